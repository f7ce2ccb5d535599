// Choice of the kernels for this machine.
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"

namespace comera {
namespace {

const Kernels& choose() {
  const char* requested = std::getenv("COMERA_CPU");
  const auto is_allowed = [&](const Kernels& kernels) { return requested == nullptr || std::string(requested) == kernels.name; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;  // Clang's __builtin_cpu_supports doesn't know f16c
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && is_allowed(kernels_avx512)) return kernels_avx512;
  if (has_avx2 && is_allowed(kernels_avx2)) return kernels_avx2;
#endif
  if (is_allowed(kernels_portable)) return kernels_portable;
  throw std::invalid_argument(
      std::string("COMERA_CPU is '") + requested +
      "', which this machine doesn't run: choose portable, avx2 or avx512, or unset it");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace comera
