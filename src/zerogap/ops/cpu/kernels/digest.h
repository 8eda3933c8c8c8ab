// Digest of bytes, chunk by chunk (ops/digest.py combines the chunks).
#pragma once
#include "team.h"

namespace zg {

constexpr int64_t DIGEST_CHUNK = 1 << 18;  // bytes

// hashes[2c], hashes[2c + 1] = two 64-bit hashes of chunk c; the last chunk is padded with zero bytes to whole words.
struct DigestArgs {
    int64_t rows;  // bytes
    const uint8_t* data;
    uint64_t* hashes;  // [ceil(rows / DIGEST_CHUNK), 2]
};
void run_digest(const void* args, Team& team);

}  // namespace zg
