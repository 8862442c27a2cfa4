/* An update of parameters in a CPU's memory: clipping, the optimizer's rule and the copies in bfloat16, each number
 * once to the processor and once back. Built at installation where there is a C compiler (setup.py), called by
 * compiled.py; without it the rules do the same by torch, in passes of their own.
 *
 * Owns arithmetic alone: no memory, no state, no threads. Plain C11, whose roundings are those that are written
 * here (-ffp-contract=off); which of them torch's kernels make at one go is said to it. (D-kernels-005)
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "updates need arithmetic that rounds to float32 at once"
#endif

/* One build for any x86-64: the loader takes the clone for the CPU at hand. */
#if !defined(EVERY_CPU) && defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define EVERY_CPU __attribute__((target_clones("avx512f", "fma", "default")))
#endif
#endif
#ifndef EVERY_CPU
#define EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

/* To be raised with every change of a function or struct below: compiled.py uses no other one than it knows. */
#define INTERFACE 1

/* Numbers that are worked on at once: they stay in the first cache from clipping to the copy. */
enum { BLOCK = 1024 };

/* Parts begin at multiples of it: no two threads write into one line of the cache, and none into the middle of
 * what torch works on at once (``width``, which divides it). */
enum { LINE = 32 };

enum { ADAMW = 0, ADAM = 1, SGD = 2, LION = 3 };

/* How torch's kernels round on the CPU at hand. */
enum { PLAIN = 0, FUSED = 1, FUSED_REST = 2 };

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

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* x * y + z, rounded once where ``fuses``, a constant where it is inlined. */
INLINE float multiply_add(float x, float y, float z, int fuses)
{
    return fuses ? __builtin_fmaf(x, y, z) : x * y + z;
}

/* From ``moment`` towards ``grad`` by ``weight``, as torch.lerp: from the end that is nearer. */
INLINE float lerp(float moment, float grad, float weight, int fuses)
{
    int near = __builtin_fabsf(weight) < 0.5f;
    return multiply_add(near ? weight : weight - 1.0f, grad - moment, near ? moment : grad, fuses);
}

/* Adam and AdamW. ``decays``: there is a weight decay. All but pointers and size are constants where it is
 * inlined. */
INLINE void adam(
    float *restrict param, const float *restrict grad, float *restrict first, float *restrict second,
    int64_t size, const struct step *step, int decoupled, int decays, int rounding)
{
    int fuses = rounding != PLAIN;
    double decay = fuses ? __builtin_fma(-step->lr, step->weight_decay, 1.0)
                         : 1.0 - step->lr * step->weight_decay;
    float keep = (float)decay, into_grad = (float)step->weight_decay;
    float weight1 = (float)(1.0 - step->beta1), weight2 = (float)(1.0 - step->beta2);
    float beta2 = (float)step->beta2, root = (float)step->bias2_root, eps = (float)step->eps;
    float rate = (float)(-step->lr / step->bias1);
    for (int64_t at = 0; at < size; at++) {
        float value = param[at], slope = grad[at];
        if (decays && decoupled)
            value *= keep;
        if (decays && !decoupled)
            slope = multiply_add(value, into_grad, slope, fuses);
        float mean = lerp(first[at], slope, weight1, fuses);
        float weighted = weight2 * slope, square;
        if (rounding == FUSED)
            square = __builtin_fmaf(weighted, slope, second[at] * beta2);
        else
            square = multiply_add(second[at], beta2, weighted * slope, fuses);
        first[at] = mean;
        second[at] = square;
        param[at] = value + rate * mean / (__builtin_sqrtf(square) / root + eps);
    }
}

/* SGD without dampening. ``momentum``: there is one, and a first slot. */
INLINE void sgd(
    float *restrict param, const float *restrict grad, float *restrict first, int64_t size,
    const struct step *step, int momentum, int nesterov, int decays, int rounding)
{
    int fuses = rounding != PLAIN;
    float into_grad = (float)step->weight_decay, keep = (float)step->momentum, rate = (float)-step->lr;
    for (int64_t at = 0; at < size; at++) {
        float value = param[at], slope = grad[at];
        if (decays)
            slope = multiply_add(value, into_grad, slope, fuses);
        if (momentum) {
            float mean = multiply_add(first[at], keep, slope, rounding == FUSED_REST);
            first[at] = mean;
            slope = nesterov ? multiply_add(mean, keep, slope, fuses) : mean;
        }
        param[at] = multiply_add(rate, slope, value, fuses);
    }
}

INLINE void lion(
    float *restrict param, const float *restrict grad, float *restrict first, int64_t size,
    const struct step *step, int fuses)
{
    float keep = (float)(1.0 - step->lr * step->weight_decay), rate = (float)-step->lr;
    float towards = (float)(1.0 - step->beta1), moves = (float)(1.0 - step->beta2);
    for (int64_t at = 0; at < size; at++) {
        float mean = first[at], slope = grad[at];
        float way = lerp(mean, slope, towards, fuses);
        float sign = (float)((way > 0.0f) - (way < 0.0f));
        param[at] = param[at] * keep + rate * sign;
        first[at] = lerp(mean, slope, moves, fuses);
    }
}

/* ``rounding``: a constant. */
INLINE void apply(
    float *param, const float *grad, float *first, float *second, int64_t size, const struct step *step,
    int rounding)
{
    int decays = step->weight_decay != 0.0, nesterov = step->nesterov != 0;
    if (step->rule == LION)
        lion(param, grad, first, size, step, rounding != PLAIN);
    else if (step->rule == ADAMW && decays)
        adam(param, grad, first, second, size, step, 1, 1, rounding);
    else if (step->rule == ADAM && decays)
        adam(param, grad, first, second, size, step, 0, 1, rounding);
    else if (step->rule != SGD)
        adam(param, grad, first, second, size, step, 0, 0, rounding);
    else if (!first)
        decays ? sgd(param, grad, first, size, step, 0, 0, 1, rounding)
               : sgd(param, grad, first, size, step, 0, 0, 0, rounding);
    else if (nesterov)
        decays ? sgd(param, grad, first, size, step, 1, 1, 1, rounding)
               : sgd(param, grad, first, size, step, 1, 1, 0, rounding);
    else
        decays ? sgd(param, grad, first, size, step, 1, 0, 1, rounding)
               : sgd(param, grad, first, size, step, 1, 0, 0, rounding);
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
        int64_t lines = (sizes[key] + LINE - 1) / LINE;
        int64_t begin = lines * part / parts * LINE;
        int64_t end = lines * (part + 1) / parts * LINE;
        end = end < sizes[key] ? end : sizes[key];
        int64_t rest = sizes[key] - sizes[key] % step->width; /* where torch's kernels take one at a time */
        for (int64_t at = begin; at < end; at += BLOCK) {
            int64_t size = end - at < BLOCK ? end - at : BLOCK;
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
            if (step->fuses) {
                apply(param, grad, slot, square, whole, step, FUSED);
                apply(param + whole, grad + whole, slot ? slot + whole : NULL, square ? square + whole : NULL,
                      size - whole, step, FUSED_REST);
            } else {
                apply(param, grad, slot, square, size, step, PLAIN);
            }
            if (slot == wide)
                narrow_to((uint16_t *)first[key] + at, wide, size, (uint32_t)step->nan);
            if (rounded[key])
                narrow_to(rounded[key] + at, param, size, (uint32_t)step->nan);
        }
    }
}
