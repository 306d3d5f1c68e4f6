/* SHA-256, as FIPS 180-4 has it. */
enum { BLOCK = 64, DIGEST_LETTERS = 64 };

struct sha256 {
    u32 state[8];
    u64 size; /* bytes so far */
    u8 block[BLOCK];
};

static const u32 round_constants[BLOCK] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static void begin_sha256(struct sha256 *hash)
{
    static const u32 first[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    memcpy(hash->state, first, sizeof first);
    hash->size = 0;
}

static inline u32 turned(u32 word, int bits)
{
    return word >> bits | word << (32 - bits);
}

static void add_block(u32 *state, const u8 *block)
{
    u32 words[BLOCK], s[8];
    for (int i = 0; i < 16; i++)
        words[i] = (u32)block[4 * i] << 24 | (u32)block[4 * i + 1] << 16 | (u32)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < BLOCK; i++) {
        u32 a = words[i - 15], b = words[i - 2];
        words[i] = words[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + words[i - 7] +
                   (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < BLOCK; i++) {
        u32 choice = (s[4] & s[5]) ^ (~s[4] & s[6]), majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        u32 one = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) + choice + round_constants[i] + words[i];
        u32 two = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) + majority;
        for (int at = 7; at > 0; at--)
            s[at] = s[at - 1];
        s[4] += one;
        s[0] = one + two;
    }
    for (int i = 0; i < 8; i++)
        state[i] += s[i];
}

static void add_sha256(struct sha256 *hash, const u8 *from, size_t size)
{
    while (size) {
        size_t held = hash->size % BLOCK, part = BLOCK - held < size ? BLOCK - held : size;
        if (part == BLOCK)
            add_block(hash->state, from);
        else {
            memcpy(hash->block + held, from, part);
            if (held + part == BLOCK)
                add_block(hash->state, hash->block);
        }
        hash->size += part;
        from += part;
        size -= part;
    }
}

/* The digest in small hexadecimal letters, without a NUL behind them. */
static void end_sha256(struct sha256 *hash, char *digest)
{
    static const u8 padding[BLOCK] = {0x80};
    u64 bits = hash->size * 8;
    u8 length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (u8)(bits >> (56 - 8 * i));
    add_sha256(hash, padding, 1 + (BLOCK + 55 - hash->size % BLOCK) % BLOCK);
    add_sha256(hash, length, sizeof length);
    for (int i = 0; i < DIGEST_LETTERS; i++)
        digest[i] = "0123456789abcdef"[hash->state[i / 8] >> (28 - 4 * (i % 8)) & 15];
}
