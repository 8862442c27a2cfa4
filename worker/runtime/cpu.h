/* What the C files of the worker share: arithmetic that rounds at once, one build for any CPU, a float32 by its
 * bits, and how a pass over numbers is divided among threads.
 *
 * Whoever includes it says for which CPUs x86-64 gets a clone of a function that is EVERY_CPU:
 *
 *     #define CLONES "avx512f", "avx2", "default"
 *     #include "../runtime/cpu.h"
 */

#ifndef OOBLECKD_CPU_H
#define OOBLECKD_CPU_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "sums and updates need arithmetic that rounds to float32 and float64 at once"
#endif

/* One build for any x86-64: the loader takes the clone for the CPU at hand. */
#if !defined(EVERY_CPU) && defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define EVERY_CPU __attribute__((target_clones(CLONES)))
#endif
#endif
#ifndef EVERY_CPU
#define EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Numbers [begin, end) of an array. */
struct range {
    int64_t begin, end;
};

/* Part ``part`` of ``parts`` of ``size`` numbers: all parts begin at multiples of ``line``. */
INLINE struct range part_of(int64_t size, int64_t line, int64_t part, int64_t parts)
{
    int64_t lines = (size + line - 1) / line;
    int64_t end = lines * (part + 1) / parts * line;
    return (struct range){lines * part / parts * line, end < size ? end : size};
}

#endif
