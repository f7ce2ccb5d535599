// Updates of slices in any number format. Included by kernels.cpp: compiled once for each instruction set.
#pragma once

#include <algorithm>

#include "slices.h"

namespace comera {
namespace {

// The optimizers' formulas, on a slice of n numbers and its state.
COMERA_INLINE void update_floats(
    const Update& update, int64_t n, float* __restrict x, float* __restrict g, float* __restrict m, float* __restrict v) {
  const float lr = update.lr, eps = update.eps;
  if (update.weight_decay != 0 && update.kind == Update::Kind::adamw) {
    for (int64_t i = 0; i < n; ++i) x[i] *= 1 - lr * update.weight_decay;
  } else if (update.weight_decay != 0) {
    for (int64_t i = 0; i < n; ++i) g[i] += update.weight_decay * x[i];
  }
  switch (update.kind) {
    case Update::Kind::sgd:
      for (int64_t i = 0; i < n; ++i) x[i] -= lr * g[i];
      break;
    case Update::Kind::adagrad:  // Duchi et al., JMLR 2011
      for (int64_t i = 0; i < n; ++i) {
        m[i] += g[i] * g[i];
        x[i] -= lr * g[i] / (__builtin_sqrtf(m[i]) + eps);
      }
      break;
    case Update::Kind::row_wise_adagrad:
      break;  // `update_slice` makes a step of SGD of it
    case Update::Kind::adam:  // Kingma and Ba, ICLR 2015
    case Update::Kind::adamw: {  // Loshchilov and Hutter, ICLR 2019
      const float gain1 = update.gain1, gain2 = update.gain2, b2 = update.beta2, step = lr / update.correction1;
      const float root = __builtin_sqrtf(update.correction2);
      for (int64_t i = 0; i < n; ++i) {
        m[i] += gain1 * (g[i] - m[i]);
        v[i] = b2 * v[i] + gain2 * g[i] * g[i];
        x[i] -= step * m[i] / (__builtin_sqrtf(v[i]) / root + eps);
      }
      break;
    }
  }
}

// A step for each number of a slice.
void update_numbers(const Core& core, const Update& update, int64_t slice, float* gradient) {
  const int64_t at = slice * core.size, n = core.size;
  constexpr int64_t kBlock = 256;
  float x[kBlock], m[kBlock], v[kBlock];
  const auto data_at = [&](int64_t i) { return offset(core.data, core.number, at + i); };
  const auto count_at = [&](int64_t i) { return i + kBlock < n ? kBlock : n - i; };
  if (core.number == Number::float32) {
    float* const all[] = {static_cast<float*>(core.data), gradient, static_cast<float*>(update.first), static_cast<float*>(update.second)};
    const auto part = [&](int i) { return all[i] == nullptr || i == 1 ? all[i] : all[i] + at; };
    if (n >= kWidth) return update_floats(update, n, part(0), part(1), part(2), part(3));
    float padded[4][kWidth];  // one vector, whose other lanes are not stored
    for (int i = 0; i < 4; ++i)
      if (all[i] != nullptr) store<kWidth>(padded[i], load_part(part(i), n));
    update_floats(update, kWidth, padded[0], padded[1], padded[2], padded[3]);
    for (int i = 0; i < 4; ++i)
      if (all[i] != nullptr) store_part(part(i), load<kWidth>(padded[i]), n);
    return;
  }
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = count_at(i);
    widen(data_at(i), core.number, count, x);
    void* first = update.first ? offset(update.first, core.number, at + i) : nullptr;
    void* second = update.second ? offset(update.second, core.number, at + i) : nullptr;
    if (first) widen(first, core.number, count, m);
    if (second) widen(second, core.number, count, v);
    update_floats(update, count, x, gradient + i, m, v);
    if (first) narrow_at_random(m, core.number, count, first, stream_of(update.seed, 1), at + i);
    if (second) narrow_at_random(v, core.number, count, second, stream_of(update.seed, 2), at + i);
    narrow_at_random(x, core.number, count, data_at(i), stream_of(update.seed, 0), at + i);
  }
}

void add_decay(const Core& core, float decay, int64_t slice, float* gradient) {
  float x[256];
  for (int64_t i = 0, count; i < core.size; i += count) {
    count = std::min<int64_t>(256, core.size - i);
    widen(offset(core.data, core.number, slice * core.size + i), core.number, count, x);
    add_scaled(gradient + i, x, decay, count);
  }
}

COMERA_INLINE void update_slice(const Core& core, const Update& update, int64_t slice, float* gradient) {
  if (update.kind != Update::Kind::row_wise_adagrad) return update_numbers(core, update, slice, gradient);
  // One sum a slice, of the mean square, and then a step of SGD.
  if (update.weight_decay != 0) add_decay(core, update.weight_decay, slice, gradient);
  const int64_t n = core.size;
  float* sum = static_cast<float*>(update.first) + slice;
  *sum += dot(gradient, gradient, n) / float(n);
  Update step;
  step.lr = update.lr / (__builtin_sqrtf(*sum) + update.eps);
  step.seed = update.seed;
  if (core.number == Number::float32) return add_scaled(static_cast<float*>(core.data) + slice * n, gradient, -step.lr, n);
  update_numbers(core, step, slice, gradient);
}

}  // namespace
}  // namespace comera
