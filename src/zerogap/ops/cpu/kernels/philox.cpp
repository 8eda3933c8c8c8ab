// Philox4x32-10; constants and round as in the Random123 publication.
#include "philox.h"
#include "sampling.h"

namespace zg {

Philox philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
        const uint32_t n0 = uint32_t(b >> 32) ^ c1 ^ k0, n2 = uint32_t(a >> 32) ^ c3 ^ k1;
        c0 = n0; c1 = uint32_t(b); c2 = n2; c3 = uint32_t(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

uint64_t sampling_draw(const int64_t words[4]) {
    const uint64_t seed = uint64_t(words[0]), step_prompt = uint64_t(words[1]);
    const Philox p = philox(uint32_t(words[3]), uint32_t(step_prompt), uint32_t(step_prompt >> 32), uint32_t(words[2]),
                            uint32_t(seed), uint32_t(seed >> 32));
    return uint64_t(p.word[1]) << 32 | p.word[0];
}

void run_philox(const void* args, Team& team) {
    const PhiloxArgs& a = *static_cast<const PhiloxArgs*>(args);
    if (team.rank) return;
    for (int64_t i = 0; i < a.rows; i++) {
        const uint32_t *c = a.counters + 4 * i, *k = a.keys + 2 * i;
        const Philox p = philox(c[0], c[1], c[2], c[3], k[0], k[1]);
        for (int j = 0; j < 4; j++) a.out[4 * i + j] = p.word[j];
    }
}

}  // namespace zg
