// Eight lanes of 64-bit integers; each step is a bijection of the lane for a fixed word and of the word for a fixed lane,
// so a change within one word always changes its lane, and a change of one lane always changes both hashes.
// Integers only: every build, thread count and byte-for-byte equal tensor gives the same digest (little-endian machines).
#include "digest.h"

namespace zg {
namespace {

constexpr int WORDS = 8;
constexpr uint64_t P1 = 0x9e3779b185ebca87ull, P2 = 0xc2b2ae3d27d4eb4full, P3 = 0x165667b19e3779f9ull;

inline uint64_t rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }
inline uint64_t step(uint64_t lane, uint64_t word) { return rotate(lane + word * P2, 31) * P1; }

inline uint64_t avalanche(uint64_t x) {
    x = (x ^ (x >> 33)) * P2;
    x = (x ^ (x >> 29)) * P3;
    return x ^ (x >> 32);
}

void hash_chunk(const uint8_t* data, int64_t bytes, uint64_t* out) {
    uint64_t lane[WORDS], word[WORDS];
    for (int l = 0; l < WORDS; l++) lane[l] = P3 * uint64_t(l + 1);
    int64_t i = 0;
    for (; i + int64_t(sizeof(word)) <= bytes; i += sizeof(word)) {
        memcpy(word, data + i, sizeof(word));
        for (int l = 0; l < WORDS; l++) lane[l] = step(lane[l], word[l]);
    }
    if (i < bytes) {
        memset(word, 0, sizeof(word));
        memcpy(word, data + i, bytes - i);
        for (int l = 0; l < WORDS; l++) lane[l] = step(lane[l], word[l]);
    }
    uint64_t low = P1 ^ uint64_t(bytes), high = P2 + uint64_t(bytes);
    for (int l = 0; l < WORDS; l++) {
        low = step(low, avalanche(lane[l]));
        high = step(high, avalanche(lane[WORDS - 1 - l] ^ P3));
    }
    out[0] = avalanche(low);
    out[1] = avalanche(high);
}

}  // namespace

void run_digest(const void* args, Team& team) {
    const DigestArgs& a = *static_cast<const DigestArgs*>(args);
    for (int64_t chunk; (chunk = team.next(0)) * DIGEST_CHUNK < a.rows;) {
        const int64_t start = chunk * DIGEST_CHUNK;
        hash_chunk(a.data + start, min_of(DIGEST_CHUNK, a.rows - start), a.hashes + 2 * chunk);
    }
}

}  // namespace zg
