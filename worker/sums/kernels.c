/* Gradient sums in a CPU's memory, each pass once over its numbers. Built at installation where there is a C
 * compiler (setup.py), called by compiled.py; without it worker/sums/chunked.py does the same by torch.
 *
 * Owns arithmetic alone: no memory, no state, no threads. Plain C11: what is said to the compiler makes loops
 * faster and changes no bit (-ffp-contract=off, and no -ffast-math). (D-kernels-001)
 */

#define CLONES "avx512f", "avx2", "default"
#include "../runtime/cpu.h"

/* To be raised with every change of a function below: compiled.py uses no other one than it knows. */
#define INTERFACE 2

/* Between 2**52 and 2**53 float64 has no fractions: to add it and take it away again rounds to an integer. */
static const double BASE = 0x1.8p52;

enum { BF16 = 0, FLOAT32 = 1 };

/* Parts begin at multiples of it, so that no two threads write into one line of the cache. */
enum { LINE = 16 };

INLINE uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE uint32_t word_of(const void *grad, int kind, int64_t at)
{
    if (kind == BF16)
        return (uint32_t)((const uint16_t *)grad)[at] << 16;
    return ((const uint32_t *)grad)[at];
}

/* One key: total += grad * factor, rounded; the first one overwrites. ``kind`` and ``first`` are constants where
 * it is inlined. What is not negative has the order of its bits, and a NaN is above all. */
INLINE void add_key(
    double *restrict total, const void *restrict grad, int kind, int first, int64_t begin, int64_t end,
    double factor, int32_t *seen, uint64_t *changed)
{
    int32_t largest = *seen;
    uint64_t difference = 0;
    for (int64_t at = begin; at < end; at++) {
        uint32_t word = word_of(grad, kind, at);
        int32_t magnitude = (int32_t)(word & 0x7fffffffu);
        largest = magnitude > largest ? magnitude : largest;
        double term = ((double)float_of(word) * factor + BASE) - BASE;
        double before = first ? 0.0 : total[at];
        double after = before + term; /* 0.0 + -0.0 is 0.0: no sum is -0.0 */
        total[at] = after;
        difference += bits_of(after) - (first ? 0 : bits_of(before));
    }
    *seen = largest;
    *changed += difference;
}

int32_t oobleckd_sums_interface(void)
{
    return INTERFACE;
}

/* Add one micro-batch's gradients to ``total``: part ``part`` of ``parts`` of every key, which parts may do at
 * once.
 *
 * begins, sizes: of keys in ``total``, in numbers; grads, kinds: their gradients, contiguous; factors: what they
 * are multiplied with before they are rounded; first: nothing is in ``total`` yet. By key, seen: the largest
 * magnitude so far as the bits of a float32. changed: goes up by what the sum of the bits of ``total`` does,
 * modulo 2**64. */
EVERY_CPU
void oobleckd_sums_add(
    double *total, int64_t num_keys, const int64_t *begins, const int64_t *sizes, const void *const *grads,
    const int32_t *kinds, const double *factors, int32_t first, int64_t part, int64_t parts, int32_t *seen,
    uint64_t *changed)
{
    for (int64_t key = 0; key < num_keys; key++) {
        struct range range = part_of(sizes[key], LINE, part, parts);
        double *into = total + begins[key];
        const void *grad = grads[key];
        double factor = factors[key];
        if (kinds[key] == BF16) {
            if (first)
                add_key(into, grad, BF16, 1, range.begin, range.end, factor, seen + key, changed);
            else
                add_key(into, grad, BF16, 0, range.begin, range.end, factor, seen + key, changed);
        } else {
            if (first)
                add_key(into, grad, FLOAT32, 1, range.begin, range.end, factor, seen + key, changed);
            else
                add_key(into, grad, FLOAT32, 0, range.begin, range.end, factor, seen + key, changed);
        }
    }
}

/* The sum of the bits of ``size`` numbers, modulo 2**64. */
EVERY_CPU
uint64_t oobleckd_sums_checksum(const double *numbers, int64_t size)
{
    uint64_t sum = 0;
    for (int64_t at = 0; at < size; at++)
        sum += bits_of(numbers[at]);
    return sum;
}

/* Sums of the rows and of the columns of ``rows`` times ``width`` words, modulo 2**64. */
EVERY_CPU
void oobleckd_sums_square(
    const uint64_t *restrict words, int64_t rows, int64_t width, uint64_t *restrict by_row,
    uint64_t *restrict by_column)
{
    memset(by_column, 0, (size_t)width * sizeof *by_column);
    for (int64_t row = 0; row < rows; row++) {
        const uint64_t *word = words + row * width;
        uint64_t sum = 0;
        for (int64_t column = 0; column < width; column++) {
            sum += word[column];
            by_column[column] += word[column];
        }
        by_row[row] = sum;
    }
}

INLINE int64_t finish_key(
    const double *restrict total, const double *restrict other, int both, int64_t size, double divisor,
    float *restrict mean, double *restrict squares)
{
    int64_t largest = 0;
    for (int64_t at = 0; at < size; at++) {
        double sum = both ? total[at] + other[at] : total[at];
        int64_t magnitude = (int64_t)(bits_of(sum) & 0x7fffffffffffffffu);
        largest = magnitude > largest ? magnitude : largest;
        float value = (float)(sum / divisor);
        mean[at] = value;
        squares[at] = (double)value * (double)value;
    }
    return largest;
}

/* The end of a step for ``size`` numbers of one key, whose total is ``total`` and, where it is not null,
 * ``other``: mean = total / divisor in float32, its squares in float64, and the largest magnitude in the total as
 * the bits of a float64. */
EVERY_CPU
int64_t oobleckd_sums_finish(
    const double *total, const double *other, int64_t size, double divisor, float *mean, double *squares)
{
    if (other)
        return finish_key(total, other, 1, size, divisor, mean, squares);
    return finish_key(total, total, 0, size, divisor, mean, squares);
}
