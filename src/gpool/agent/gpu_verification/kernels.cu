// What the proof of GPU and the benchmark run on the device. Compiled to PTX by bench/gpu/compile_kernels.py, which the
// driver compiles again for the GPU at hand. The reference for every number here is gpool.server.gpu_proofs.streams.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define GOLDEN 0x9E3779B97F4A7C15ull
#define TILE 64            // a tile of X: 64 rows of 64 four-bit values, 2048 bytes, 256 words
#define TILE_WORDS 256

__device__ __forceinline__ u64 mix(u64 z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

__device__ __forceinline__ u64 row_key(u64 key0, u64 key1, u32 side, u32 block, u32 row) {
    return mix(key0 + (((u64)side << 62) | ((u64)block << 32) | row) * GOLDEN) ^ key1;
}

// Rows first..first+rows of A (side 0) or of B's transpose (side 1) of one block: `words` words of eight bytes in each.
extern "C" __global__ void fill_rows(u64* out, u64 key0, u64 key1, u32 side, u32 block, u32 first, u32 rows, u32 words) {
    u32 row = blockIdx.y;
    if (row >= rows) return;
    u64 key = row_key(key0, key1, side, block, first + row);
    for (u32 w = blockIdx.x * blockDim.x + threadIdx.x; w < words; w += gridDim.x * blockDim.x)
        out[(u64)row * words + w] = mix(key + (u64)(w + 1) * GOLDEN);
}

// ---- the product: 128 x 256 of C for each thread block, eight warps of 64 x 64, steps of 64 bytes along k.

#define ROWS 128
#define COLS 256
#define STEP 64
#define STAGE_BYTES ((ROWS + COLS) * STEP)
#if __CUDA_ARCH__ >= 800
#define STAGES 4
#else
#define STAGES 2
#endif

__device__ __forceinline__ void copy16(u32 to, const u8* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from));
#else
    uint4 v = *(const uint4*)from;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}

__device__ __forceinline__ void copies_end() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;\n" ::);
#endif
}

__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 2));
#endif
}

__device__ __forceinline__ void load4(u32* r, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// The three kinds of multiplication have the same fragments when they are counted in bytes.
struct Int8 {
    typedef int Sum;
    __device__ static __forceinline__ void multiply(int* c, const u32* a, const u32* b) {
#if __CUDA_ARCH__ >= 800
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#define SMALL(c0, c1, a0, b0) \
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};\n" \
                 : "+r"(c0), "+r"(c1) : "r"(a0), "r"(b0))
        SMALL(c[0], c[1], a[0], b[0]);
        SMALL(c[0], c[1], a[2], b[1]);
        SMALL(c[2], c[3], a[1], b[0]);
        SMALL(c[2], c[3], a[3], b[1]);
#endif
    }
};

#if __CUDA_ARCH__ >= 800
struct Bf16 {
    typedef float Sum;
    __device__ static __forceinline__ void multiply(float* c, const u32* a, const u32* b) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};
struct Tf32 {
    typedef float Sum;
    __device__ static __forceinline__ void multiply(float* c, const u32* a, const u32* b) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};
#endif

template <class Kind>
__device__ __forceinline__ void multiply_tile(typename Kind::Sum (&sums)[4][8][4], const u8* a, const u8* b, u32 length,
                                              u32 row0, u32 col0) {
    extern __shared__ __align__(128) u8 stage[];
    u32 base = (u32)__cvta_generic_to_shared(stage);
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    u32 steps = length / STEP;
    const u8* from[6];
    u32 to[6];
#pragma unroll
    for (int i = 0; i < 6; i++) {  // 384 rows of four chunks of 16 bytes: six chunks a thread
        u32 row = (thread >> 2) + i * 64, chunk = thread & 3;
        from[i] = (row < ROWS ? a + (u64)(row0 + row) * length : b + (u64)(col0 + row - ROWS) * length) + chunk * 16;
        to[i] = base + row * STEP + ((chunk ^ ((row >> 1) & 3)) << 4);
    }
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps)
#pragma unroll
            for (int i = 0; i < 6; i++) copy16(to[i] + s * STAGE_BYTES, from[i] + s * STEP);
        copies_end();
    }
    u32 warp_row = (warp & 1) * 64, warp_col = ROWS + (warp >> 1) * 64;
    for (u32 step = 0; step < steps; step++) {
        copies_wait();
        __syncthreads();
        u32 next = step + STAGES - 1;
        if (next < steps)
#pragma unroll
            for (int i = 0; i < 6; i++) copy16(to[i] + (next % STAGES) * STAGE_BYTES, from[i] + (u64)next * STEP);
        copies_end();
        u32 here = base + (step % STAGES) * STAGE_BYTES;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 fa[4][4], fb[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 row = warp_row + i * 16 + (lane & 15), chunk = half * 2 + (lane >> 4);
                load4(fa[i], here + row * STEP + ((chunk ^ ((row >> 1) & 3)) << 4));
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 row = warp_col + j * 16 + (lane & 7) + ((lane >> 4) << 3), chunk = half * 2 + ((lane >> 3) & 1);
                load4(fb[j], here + row * STEP + ((chunk ^ ((row >> 1) & 3)) << 4));
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) Kind::multiply(sums[i][j], fa[i], &fb[j >> 1][(j & 1) * 2]);
        }
    }
}

// Thread blocks near in time share rows and columns, so that they meet in the L2 cache: bands of eight rows of them.
__device__ __forceinline__ void place(u32 n, u32* row0, u32* col0) {
    u32 down = n / ROWS, across = n / COLS, band = 8 * across;
    u32 first = blockIdx.x / band * 8, height = min(down - first, 8u), in_band = blockIdx.x % band;
    *row0 = (first + in_band % height) * ROWS;
    *col0 = in_band / height * COLS;
}

// X = bits 8..11 of C = A·B for one block of n x n, tile after tile.
extern "C" __global__ void __launch_bounds__(256, 1)
multiply_block(u8* x, const u8* a, const u8* b, u32 n, u32 length) {
    int sums[4][8][4] = {};
    u32 row0, col0;
    place(n, &row0, &col0);
    multiply_tile<Int8>(sums, a, b, length, row0, col0);
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 row = (row0 + (warp & 1) * 64) / TILE, col = (col0 + (warp >> 1) * 64) / TILE;
    u8* tile = x + (u64)(row * (n / TILE) + col) * (TILE_WORDS * 8);  // a warp's part is one tile
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 low = ((u32)sums[i][j][2 * h] >> 8) & 15, high = ((u32)sums[i][j][2 * h + 1] >> 8) & 15;
                tile[(i * 16 + h * 8 + (lane >> 2)) * 32 + j * 4 + (lane & 3)] = (u8)(low | high << 4);
            }
}

template <class Kind>
__device__ __forceinline__ void multiply_floats(float* out, const u8* a, const u8* b, u32 n, u32 length) {
    typename Kind::Sum sums[4][8][4] = {};
    u32 row0, col0;
    place(n, &row0, &col0);
    multiply_tile<Kind>(sums, a, b, length, row0, col0);
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int v = 0; v < 4; v++) {
                u32 row = row0 + (warp & 1) * 64 + i * 16 + (v >> 1) * 8 + (lane >> 2);
                u32 col = col0 + (warp >> 1) * 64 + j * 8 + (lane & 3) * 2 + (v & 1);
                out[(u64)row * n + col] = sums[i][j][v];
            }
}

#if __CUDA_ARCH__ >= 800
extern "C" __global__ void __launch_bounds__(256, 1)
multiply_bf16(float* out, const u8* a, const u8* b, u32 n, u32 length) { multiply_floats<Bf16>(out, a, b, n, length); }
extern "C" __global__ void __launch_bounds__(256, 1)
multiply_tf32(float* out, const u8* a, const u8* b, u32 n, u32 length) { multiply_floats<Tf32>(out, a, b, n, length); }
#endif

// Plain fp32 without tensor cores: out = a·b, n x n, row after row; 128 x 128 for each 256 threads.
extern "C" __global__ void __launch_bounds__(256, 2)
multiply_fp32(float* out, const float* a, const float* b, u32 n) {
    __shared__ float sa[8][132], sb[8][128];
    u32 row0 = blockIdx.y * 128, col0 = blockIdx.x * 128, t = threadIdx.x;
    u32 ty = t / 16, tx = t % 16;
    float sums[8][8] = {};
    for (u32 k = 0; k < n; k += 8) {
        float4 va = *(const float4*)(a + (u64)(row0 + t / 2) * n + k + (t % 2) * 4);
        float4 vb = *(const float4*)(b + (u64)(k + t / 32) * n + col0 + (t % 32) * 4);
        __syncthreads();
        u32 ka = (t % 2) * 4;
        sa[ka][t / 2] = va.x; sa[ka + 1][t / 2] = va.y; sa[ka + 2][t / 2] = va.z; sa[ka + 3][t / 2] = va.w;
        *(float4*)&sb[t / 32][(t % 32) * 4] = vb;
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < 8; kk++) {
            float fa[8], fb[8];
            *(float4*)&fa[0] = *(const float4*)&sa[kk][ty * 4];
            *(float4*)&fa[4] = *(const float4*)&sa[kk][64 + ty * 4];
            *(float4*)&fb[0] = *(const float4*)&sb[kk][tx * 4];
            *(float4*)&fb[4] = *(const float4*)&sb[kk][64 + tx * 4];
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sums[i][j] += fa[i] * fb[j];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
            out[(u64)(row0 + (i / 4) * 64 + ty * 4 + i % 4) * n + col0 + (j / 4) * 64 + tx * 4 + j % 4] = sums[i][j];
}

// Random floats in [0, 1) for the benchmark; bf16 is asked for by width 2.
extern "C" __global__ void fill_floats(u8* out, u64 key, u64 count, u32 width) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += stride) {
        float v = (float)(u32)(mix(key + (i + 1) * GOLDEN) >> 40) * (1.0f / 16777216.0f);
        if (width == 4) ((float*)out)[i] = v;
        else ((unsigned short*)out)[i] = (unsigned short)(__float_as_uint(v) >> 16);
    }
}

extern "C" __global__ void copy_words(uint4* to, const uint4* from, u64 count) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += stride) to[i] = from[i];
}

// ---- digests of tiles, and the Merkle tree above them

// One warp a tile: the sum of a nonlinear mix of every word with its place and the key.
extern "C" __global__ void digest_tiles(u64* out, const u64* x, u64 key0, u64 key1, u64 first, u64 tiles) {
    u64 tile = (blockIdx.x * (u64)blockDim.x + threadIdx.x) >> 5;
    u32 lane = threadIdx.x & 31;
    if (tile >= tiles) return;
    u64 key = mix(key0 + (first + tile + 1) * GOLDEN) ^ key1, sum = 0;
    const ulonglong2* words = (const ulonglong2*)(x + tile * TILE_WORDS);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        ulonglong2 v = words[i * 32 + lane];
        u64 place = (u64)(2 * (i * 32 + lane) + 1);
        sum += mix(v.x ^ mix(key + place * GOLDEN)) + mix(v.y ^ mix(key + (place + 1) * GOLDEN));
    }
#pragma unroll
    for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, s);
    if (lane == 0) out[tile] = mix(sum ^ key);
}

__constant__ u32 ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

__device__ __forceinline__ u32 turn(u32 v, int n) { return __funnelshift_r(v, v, n); }

__device__ __forceinline__ void compress(u32* h, u32* w) {
    u32 a = h[0], b = h[1], c = h[2], d = h[3], e = h[4], f = h[5], g = h[6], k = h[7];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        if (i >= 16) {
            u32 s0 = w[(i + 1) & 15], s1 = w[(i + 14) & 15];
            s0 = turn(s0, 7) ^ turn(s0, 18) ^ (s0 >> 3);
            s1 = turn(s1, 17) ^ turn(s1, 19) ^ (s1 >> 10);
            w[i & 15] += s0 + w[(i + 9) & 15] + s1;
        }
        u32 t1 = k + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + ROUND[i] + w[i & 15];
        u32 t2 = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        k = g; g = f; f = e; e = d + t1; d = c; c = b; b = a; a = t1 + t2;
    }
    h[0] += a; h[1] += b; h[2] += c; h[3] += d; h[4] += e; h[5] += f; h[6] += g; h[7] += k;
}

// SHA-256 of each 64 bytes: eight digests of tiles, or two nodes of the tree.
extern "C" __global__ void hash_pairs(u32* out, const u32* in, u64 count) {
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i >= count) return;
    u32 h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}, w[16];
#pragma unroll
    for (int j = 0; j < 16; j++) w[j] = __byte_perm(in[i * 16 + j], 0, 0x0123);
    compress(h, w);
#pragma unroll
    for (int j = 0; j < 16; j++) w[j] = 0;
    w[0] = 0x80000000;
    w[15] = 512;
    compress(h, w);
#pragma unroll
    for (int j = 0; j < 8; j++) out[i * 8 + j] = __byte_perm(h[j], 0, 0x0123);
}

// The exact C of opened tiles: 64 rows of A and 64 of B's transpose lie in `a` and `b` for each of them.
extern "C" __global__ void multiply_exactly(int* out, const int* a, const int* b, u32 length) {
    u32 col = threadIdx.x, row = blockIdx.x, words = length / 4;
    const int* ra = a + ((u64)blockIdx.y * TILE + row) * words;
    const int* rb = b + ((u64)blockIdx.y * TILE + col) * words;
    int sum = 0;
    for (u32 k = 0; k < words; k++) asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(ra[k]), "r"(rb[k]));
    out[((u64)blockIdx.y * TILE + row) * TILE + col] = sum;
}
