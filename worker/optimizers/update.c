/* An update of parameters in a CPU's memory: clipping, the optimizer's rule and the copies in bfloat16, each number
 * once to the processor and once back. Built at installation where there is a C compiler (setup.py), called by
 * compiled.py; without it the rules do the same by torch, in passes of their own.
 *
 * Owns arithmetic alone: no memory, no state, no threads. Plain C11, whose roundings are those that are written
 * here (-ffp-contract=off); which of them torch's kernels make at one go is said to it. (D-kernels-005)
 */

#include <math.h>

#define CLONES "avx512f", "fma", "default"
#include "../runtime/cpu.h"

/* To be raised with every change of a function or struct below: compiled.py uses no other one than it knows. */
#define INTERFACE 1

/* Numbers that are worked on at once: they stay in the first cache from clipping to the copy. */
enum { BLOCK = 1024 };

/* Parts begin at multiples of it: no two threads write into one line of the cache, and none into the middle of
 * what torch works on at once (``width``, which divides it). */
enum { LINE = 32 };

enum { ADAMW = 0, ADAM = 1, SGD = 2, LION = 3 };

struct step {
    /* Of the update. bias1: 1 - beta1**step; bias2_root: of 1 - beta2**step the root. */
    double lr, beta1, beta2, eps, weight_decay, momentum, bias1, bias2_root;
    /* What gradients are multiplied with first; 1: nothing. */
    double scale;
    int32_t rule, nesterov;
    /* Whether torch's kernels fuse multiplications and additions; how many numbers they take at once, of which
     * those that are left over at the end of a parameter are rounded otherwise; what NaN is in bfloat16. */
    int32_t fuses, width, nan;
    /* Whether the first slot is kept in bfloat16. */
    int32_t narrow;
};

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* x * y + z, rounded once where ``fuses``, a constant where it is inlined. */
INLINE float multiply_add(float x, float y, float z, int fuses)
{
    return fuses ? __builtin_fmaf(x, y, z) : x * y + z;
}

/* From ``moment`` towards ``grad`` by ``weight``, as torch.lerp: from the end that is nearer. */
INLINE float lerp(float moment, float grad, float weight, int fuses, int rest)
{
    int near = __builtin_fabsf(weight) < 0.5f;
    float way = grad - moment;
    if (rest) /* which shows in the signs of zeros alone */
        return near ? multiply_add(weight, way, moment, fuses) : multiply_add(-way, 1.0f - weight, grad, fuses);
    return multiply_add(near ? weight : weight - 1.0f, way, near ? moment : grad, fuses);
}

/* Adam and AdamW. Here and below, ``fuses`` and ``rest`` say how torch's kernels round: constants where they are
 * inlined. */
INLINE void adam(
    float *restrict param, const float *restrict grad, float *restrict first, float *restrict second,
    int64_t size, const struct step *step, int fuses, int rest)
{
    int decays = step->weight_decay != 0.0, decoupled = step->rule == ADAMW;
    double decay = fuses ? __builtin_fma(-step->lr, step->weight_decay, 1.0)
                         : 1.0 - step->lr * step->weight_decay;
    float keep = decays && decoupled ? (float)decay : 1.0f;
    int adds = decays && !decoupled;
    float added = (float)step->weight_decay;
    float weight1 = (float)(1.0 - step->beta1), weight2 = (float)(1.0 - step->beta2);
    float beta2 = (float)step->beta2, root = (float)step->bias2_root, eps = (float)step->eps;
    float rate = (float)(-step->lr / step->bias1);
    for (int64_t at = 0; at < size; at++) {
        float value = param[at] * keep;
        float slope = adds ? multiply_add(value, added, grad[at], fuses) : grad[at];
        float mean = lerp(first[at], slope, weight1, fuses, rest);
        float weighted = weight2 * slope, square;
        if (fuses && !rest)
            square = __builtin_fmaf(weighted, slope, second[at] * beta2);
        else
            square = multiply_add(second[at], beta2, weighted * slope, fuses);
        first[at] = mean;
        second[at] = square;
        param[at] = value + rate * mean / (__builtin_sqrtf(square) / root + eps);
    }
}

/* SGD without dampening, and without momentum where there is no ``first`` slot. */
INLINE void sgd(
    float *restrict param, const float *restrict grad, float *restrict first, int64_t size,
    const struct step *step, int fuses, int rest)
{
    int adds = step->weight_decay != 0.0, nesterov = step->nesterov;
    float added = (float)step->weight_decay, keep = (float)step->momentum, rate = (float)-step->lr;
    if (first) {
        for (int64_t at = 0; at < size; at++) {
            float value = param[at];
            float slope = adds ? multiply_add(value, added, grad[at], fuses) : grad[at];
            float mean = multiply_add(first[at], keep, slope, fuses && rest);
            first[at] = mean;
            slope = nesterov ? multiply_add(mean, keep, slope, fuses) : mean;
            param[at] = multiply_add(rate, slope, value, fuses);
        }
    } else {
        for (int64_t at = 0; at < size; at++) {
            float value = param[at];
            float slope = adds ? multiply_add(value, added, grad[at], fuses) : grad[at];
            param[at] = multiply_add(rate, slope, value, fuses);
        }
    }
}

INLINE void lion(
    float *restrict param, const float *restrict grad, float *restrict first, int64_t size,
    const struct step *step, int fuses, int rest)
{
    float keep = (float)(1.0 - step->lr * step->weight_decay), rate = (float)-step->lr;
    float towards = (float)(1.0 - step->beta1), moves = (float)(1.0 - step->beta2);
    for (int64_t at = 0; at < size; at++) {
        float mean = first[at], slope = grad[at];
        float way = lerp(mean, slope, towards, fuses, rest);
        float sign = (float)((way > 0.0f) - (way < 0.0f));
        param[at] = param[at] * keep + rate * sign;
        first[at] = lerp(mean, slope, moves, fuses, rest);
    }
}

INLINE void apply(
    float *param, const float *grad, float *first, float *second, int64_t size, const struct step *step,
    int fuses, int rest)
{
    if (step->rule == LION)
        lion(param, grad, first, size, step, fuses, rest);
    else if (step->rule == SGD)
        sgd(param, grad, first, size, step, fuses, rest);
    else
        adam(param, grad, first, second, size, step, fuses, rest);
}

INLINE void apply_all(
    float *param, const float *grad, float *first, float *second, int64_t size, int64_t whole,
    const struct step *step, int fuses)
{
    apply(param, grad, first, second, whole, step, fuses, 0);
    if (whole < size)
        apply(param + whole, grad + whole, first ? first + whole : NULL, second ? second + whole : NULL,
              size - whole, step, fuses, 1);
}

/* Write ``values`` rounded to bfloat16, to the nearest, half to even. */
INLINE void narrow_to(uint16_t *restrict into, const float *restrict values, int64_t size, uint32_t nan)
{
    for (int64_t at = 0; at < size; at++) {
        uint32_t bits = bits_of(values[at]);
        uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        into[at] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
}

INLINE void widen_to(float *restrict into, const uint16_t *restrict values, int64_t size)
{
    for (int64_t at = 0; at < size; at++)
        into[at] = float_of((uint32_t)values[at] << 16);
}

int32_t oobleckd_update_interface(void)
{
    return INTERFACE;
}

/* Update part ``part`` of ``parts`` of every parameter, which parts may do at once.
 *
 * By parameter, sizes: numbers; params; grads: multiplied in place; first, second: its slots, or null where the
 * rule has none; rounded: where its copy in bfloat16 is, or null. */
EVERY_CPU
void oobleckd_update(
    const struct step *step, int64_t num_params, const int64_t *sizes, float *const *params,
    float *const *grads, void *const *first, float *const *second, uint16_t *const *rounded, int64_t part,
    int64_t parts)
{
    float wide[BLOCK];
    float scale = (float)step->scale;
    for (int64_t key = 0; key < num_params; key++) {
        struct range range = part_of(sizes[key], LINE, part, parts);
        int64_t rest = sizes[key] - sizes[key] % step->width; /* where torch's kernels take one at a time */
        for (int64_t at = range.begin; at < range.end; at += BLOCK) {
            int64_t size = range.end - at < BLOCK ? range.end - at : BLOCK;
            int64_t whole = rest - at < size ? rest - at : size;
            whole = whole < 0 ? 0 : whole;
            float *param = params[key] + at, *grad = grads[key] + at, *slot = NULL;
            float *square = second[key] ? second[key] + at : NULL;
            if (scale != 1.0f)
                for (int64_t i = 0; i < size; i++)
                    grad[i] *= scale;
            if (first[key] && step->narrow) {
                slot = wide;
                widen_to(wide, (const uint16_t *)first[key] + at, size);
            } else if (first[key]) {
                slot = (float *)first[key] + at;
            }
            if (step->fuses)
                apply_all(param, grad, slot, square, size, whole, step, 1);
            else
                apply_all(param, grad, slot, square, size, whole, step, 0);
            if (slot == wide)
                narrow_to((uint16_t *)first[key] + at, wide, size, (uint32_t)step->nan);
            if (rounded[key])
                narrow_to(rounded[key] + at, param, size, (uint32_t)step->nan);
        }
    }
}
