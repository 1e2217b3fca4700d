/* The instructions of this processor, in the form in which __builtin_cpu_supports() of Clang looks them up.
 *
 * GCC's and LLVM's support libraries fill these variables in; zig's has them, but leaves them empty, so every kernel
 * would be the slowest one. scripts/wheels links this file in. The numbers of the features are part of the binary
 * interface that GCC and Clang share (libgcc's cpuinfo.h), and only those that our code asks for are filled in.
 */
#include <cpuid.h>

struct model {
  unsigned int vendor, type, subtype, features[1];
};
struct model __cpu_model;
unsigned int __cpu_features2[4];

enum { AVX2 = 10, FMA = 14, AVX512F = 15, AVX512VL = 20, AVX512BW = 21, AVX512DQ = 22, AVX512VNNI = 34, AVX512BF16 = 36 };

static void set(int feature, unsigned int is_there) {
  unsigned int *word = feature < 32 ? &__cpu_model.features[0] : &__cpu_features2[feature / 32 - 1];
  if (is_there) *word |= 1u << (feature % 32);
}

__attribute__((constructor(101))) static void look(void) {
  unsigned int a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return; /* the system saves no wide registers */
  const unsigned int fma = c & (1u << 12);
  unsigned int saved, high;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  const int wide = (saved & 0x6) == 0x6, widest = (saved & 0xe6) == 0xe6;
  if (!wide || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  set(FMA, fma);
  set(AVX2, b & (1u << 5));
  if (!widest) return;
  set(AVX512F, b & (1u << 16));
  set(AVX512DQ, b & (1u << 17));
  set(AVX512BW, b & (1u << 30));
  set(AVX512VL, b & (1u << 31));
  set(AVX512VNNI, c & (1u << 11));
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) set(AVX512BF16, a & (1u << 5));
}
