// Updates of slices in any number format. Included by kernels.cpp: compiled once for each instruction set.
#pragma once

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
    case Update::Kind::row_wise_adagrad: {  // one sum a slice, of the mean square
      *m += dot(g, g, n) / float(n);
      const float step = lr / (__builtin_sqrtf(*m) + eps);
      for (int64_t i = 0; i < n; ++i) x[i] -= step * g[i];
      break;
    }
    case Update::Kind::adam:  // Kingma and Ba, ICLR 2015
    case Update::Kind::adamw: {  // Loshchilov and Hutter, ICLR 2019
      const float b1 = update.beta1, b2 = update.beta2, step = lr / update.correction1;
      const float root = __builtin_sqrtf(update.correction2);
      for (int64_t i = 0; i < n; ++i) {
        m[i] += (1 - b1) * (g[i] - m[i]);
        v[i] = b2 * v[i] + (1 - b2) * g[i] * g[i];
        x[i] -= step * m[i] / (__builtin_sqrtf(v[i]) / root + eps);
      }
      break;
    }
  }
}

void update_slice(const Core& core, const Update& update, int64_t slice, float* gradient) {
  const int64_t at = slice * core.size, n = core.size;
  const bool is_row_wise = update.kind == Update::Kind::row_wise_adagrad;
  if (core.number == Number::float32) {
    float* first = static_cast<float*>(update.first);
    float* second = static_cast<float*>(update.second);
    if (n < kWidth && !is_row_wise) {  // one vector, whose other lanes are not stored
      float* const all[] = {static_cast<float*>(core.data) + at, gradient, first ? first + at : nullptr, second ? second + at : nullptr};
      float padded[4][kWidth];
      for (int i = 0; i < 4; ++i)
        if (all[i] != nullptr) store<kWidth>(padded[i], load_part(all[i], n));
      update_floats(update, kWidth, padded[0], padded[1], padded[2], padded[3]);
      for (int i = 0; i < 4; ++i)
        if (all[i] != nullptr) store_part(all[i], load<kWidth>(padded[i]), n);
      return;
    }
    update_floats(
        update, n, static_cast<float*>(core.data) + at, gradient, first ? first + (is_row_wise ? slice : at) : nullptr,
        second ? second + at : nullptr);
    return;
  }
  constexpr int64_t kBlock = 256;
  float x[kBlock], m[kBlock], v[kBlock], step = 0;
  if (is_row_wise) {  // one sum for all blocks
    for (int64_t i = 0; i < n && update.weight_decay != 0; i += kBlock) {
      const int64_t count = i + kBlock < n ? kBlock : n - i;
      widen(offset(core.data, core.number, at + i), core.number, count, x);
      add_scaled(gradient + i, x, update.weight_decay, count);
    }
    float* sum = static_cast<float*>(update.first) + slice;
    *sum += dot(gradient, gradient, n) / float(n);
    step = update.lr / (__builtin_sqrtf(*sum) + update.eps);
  }
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = i + kBlock < n ? kBlock : n - i;
    void* data = offset(core.data, core.number, at + i);
    widen(data, core.number, count, x);
    if (is_row_wise) {
      for (int64_t k = 0; k < count; ++k) x[k] -= step * gradient[i + k];
    } else {
      void* first = update.first ? offset(update.first, core.number, at + i) : nullptr;
      void* second = update.second ? offset(update.second, core.number, at + i) : nullptr;
      if (first) widen(first, core.number, count, m);
      if (second) widen(second, core.number, count, v);
      update_floats(update, count, x, gradient + i, m, v);
      if (first) narrow_at_random(m, core.number, count, first, stream_of(update.seed, 1), at + i);
      if (second) narrow_at_random(v, core.number, count, second, stream_of(update.seed, 2), at + i);
    }
    narrow_at_random(x, core.number, count, data, stream_of(update.seed, 0), at + i);
  }
}

}  // namespace
}  // namespace comera
