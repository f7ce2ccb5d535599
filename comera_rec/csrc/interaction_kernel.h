// Loops of DLRM's interaction over samples; see interaction.h.
#pragma once

#include "interaction.h"
#include "products.h"

namespace comera {
namespace {

constexpr int kTileVectors = kRegisters / 8, kTileRows = 4;

// A sample's features and what is computed from them.
struct InteractionScratch {
  InteractionScratch(const Samples& samples, float* memory)
      : rows(rounded(samples.features)), columns(rounded(samples.columns)), features(memory), transposed(features + rows * columns),
        square(transposed + rows * columns), ones(square + rows * rows), end(ones + (rows > columns ? rows : columns)) {
    std::memset(memory, 0, 4 * (ones - memory));
    for (float* one = ones; one < end; ++one) *one = 1;
  }

  COMERA_INLINE void read(const Samples& samples, int64_t sample) {
    const int64_t n = samples.columns;
    std::memcpy(features, samples.lead + sample * samples.columns, 4 * n);
    const float* from = samples.rows + sample * samples.row_step;
    for (int64_t f = 1; f < samples.features; ++f, from += n) std::memcpy(features + f * columns, from, 4 * n);
  }

  const int64_t rows, columns;  // F and N, padded
  float* const features;        // [rows, columns]
  float* const transposed;      // [columns, rows], or gradients [rows, columns]
  float* const square;          // [rows, rows]
  float* const ones;
  float* const end;
};

int64_t interaction_scratch_floats(const Samples& samples) {
  const int64_t rows = rounded(samples.features), columns = rounded(samples.columns);
  return 2 * rows * columns + rows * rows + (rows > columns ? rows : columns);
}

// c[i, j] = sum over k of a[k, i] b[k, j] for rows up to n1, a multiple of 4; if `upper`, at least for j > i.
COMERA_INLINE void multiply_padded(
    int64_t n1, int64_t n2, const float* a, int64_t a_step, const float* b, const float* ones, int64_t depth, float* c, bool upper) {
  constexpr int64_t kTileColumns = kTileVectors * kWidth;
  for (int64_t i = 0; i < n1; i += kTileRows) {
    int64_t j = upper ? i / kTileColumns * kTileColumns : 0;
    for (; j + kTileColumns <= n2; j += kTileColumns)
      multiply_tile<kTileRows, kTileVectors, kWidth>(a + i, a_step, b + j, n2, ones, depth, c + i * n2 + j, n2);
    if constexpr (kTileVectors > 2)
      for (; j + 2 * kWidth <= n2; j += 2 * kWidth)
        multiply_tile<kTileRows, 2, kWidth>(a + i, a_step, b + j, n2, ones, depth, c + i * n2 + j, n2);
    for (; j < n2; j += kWidth) multiply_tile<kTileRows, 1, kWidth>(a + i, a_step, b + j, n2, ones, depth, c + i * n2 + j, n2);
  }
}

// Writes out [B, N + P] for samples [first, beyond): the lead, then products (0, 1), (0, 2), ..., (F - 2, F - 1).
void interact(const Samples& samples, int64_t first, int64_t beyond, float* out, float* memory) {
  InteractionScratch scratch(samples, memory);
  const int64_t F = samples.features, N = samples.columns, rows = scratch.rows;
  const int64_t used = (F + kTileRows - 1) / kTileRows * kTileRows;
  out += first * samples.outputs();
  for (int64_t sample = first; sample < beyond; ++sample) {
    scratch.read(samples, sample);
    transpose(int(rows), int(scratch.columns), scratch.features, scratch.transposed);
    multiply_padded(used, rows, scratch.transposed, rows, scratch.transposed, scratch.ones, N, scratch.square, true);
    std::memcpy(out, scratch.features, 4 * N);
    out += N;
    for (int64_t i = 0; i + 1 < F; ++i) {
      std::memcpy(out, scratch.square + i * rows + i + 1, 4 * (F - 1 - i));
      out += F - 1 - i;
    }
  }
}

// Writes gradients of the lead [B, N] and of the rows [B, F - 1, N] for samples [first, beyond), from those of `interact`'s result.
void interact_backward(
    const Samples& samples, const float* gradient, int64_t first, int64_t beyond, float* lead_gradient, float* rows_gradient,
    float* memory) {
  InteractionScratch scratch(samples, memory);
  const int64_t F = samples.features, N = samples.columns, rows = scratch.rows, columns = scratch.columns;
  const int64_t used = (F + kTileRows - 1) / kTileRows * kTileRows;
  gradient += first * samples.outputs();
  for (int64_t sample = first; sample < beyond; ++sample) {
    scratch.read(samples, sample);
    const float* lead_part = gradient;
    gradient += N;
    for (int64_t i = 0; i < F; ++i)
      for (int64_t j = i + 1; j < F; ++j) scratch.square[i * rows + j] = scratch.square[j * rows + i] = *gradient++;
    multiply_padded(used, columns, scratch.square, rows, scratch.features, scratch.ones, F, scratch.transposed, false);
    float* to = lead_gradient + sample * N;
    for (int64_t n = 0; n < N; ++n) to[n] = scratch.transposed[n] + lead_part[n];
    to = rows_gradient + sample * (F - 1) * N;
    const bool streams = N % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0;
    for (int64_t f = 1; f < F; ++f, to += N) {
      if (streams) {
        stream(to, scratch.transposed + f * columns, N);
      } else {
        std::memcpy(to, scratch.transposed + f * columns, 4 * N);
      }
    }
  }
  finish_streaming();
}

}  // namespace
}  // namespace comera
