// Philox4x32-10, the counter-based generator of the sampler (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As
// Easy as 1, 2, 3", SC 2011). A draw is a pure function of its counter and key, so nothing but the key decides it.
#pragma once
#include <cstdint>

namespace zg {

struct Philox { uint32_t word[4]; };

// Ten rounds over a 128-bit counter under a 64-bit key.
Philox philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1);

// The 64-bit draw of one row: key = words[0] (seed); counter words = position, step, prompt, (attempt << 20 | sample),
// which arrive as words[3] = position, words[1] = prompt << 32 | step, words[2] = attempt << 20 | sample.
// The low word of the draw is the generator's word 0, the high word its word 1.
uint64_t sampling_draw(const int64_t words[4]);

}  // namespace zg
