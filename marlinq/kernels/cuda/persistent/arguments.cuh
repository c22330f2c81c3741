// What the host tells the persistent kernel; mirrored in launch/persistent/memory.py.
#pragma once
#include "persistent/lab.cuh"
#include "ptx/tensor_copy.cuh"

enum Product { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };
constexpr int WIDTHS = 3;  // of sets of tiles

// One layer, in global memory.
struct StepLayer {
    TensorMap words[PRODUCTS][WIDTHS], scales[PRODUCTS][WIDTHS], zeros[PRODUCTS][WIDTHS];  // boxes of 1, 2, 4 tiles
    TensorMap keys, values;                                        // [B * KV * L, D], boxes of 64 channels of a chunk's positions
    const float* attention_gamma;                                  // [H]
    const float* mlp_gamma;                                        // [H]
    const float* post_gamma[2];  // [H] of the norms behind o and down, where there are any
    const float* query_gamma;  // [D], or null where queries have no norm
    const float* key_gamma;
    const float* cosines;  // [positions, D / 2]
    const float* sines;
    const u16* bias[PRODUCTS];  // [N], or null
    u16* key_cache;             // [B, KV, L, D]
    u16* value_cache;
    const unsigned char* words_at[PRODUCTS];  // of the lab
    int window;  // positions that a query sees at most, its own included; 0: all
    int padding[11];
};

// Sizes of a product, the same in all layers.
struct ProductShape {
    int channels;           // K
    int tiles;              // N / 64
    int box_units[WIDTHS];  // units of 128 channels that a copy brings
};

struct StepArguments {
    const StepLayer* layers;
    const int* lengths;  // [M] positions in the cache
    u16* result;  // [M, H]
    // Messages.
    float* parts[PRODUCTS];         // [PARTS, M, N] sums of a part of K
    float* attention;               // [M, MAX_SPLITS, heads * D]
    float* attention_weight;        // [M, MAX_SPLITS, heads] logarithms to base 2
    float* mlp;                     // [M, I] the input of down
    float* start;                   // [M, H] the hidden state, of round 0
    float* squares[2];              // [groups][M, H / 128] sums of squares of the residual stream, in front of qkv and gate_up
    float* post_squares[2];         // likewise of what o and down give, where norms follow
    float* arrivals;                // [blocks] that a block has got so far
    ProductShape shape[PRODUCTS];
    int layer_count, rows, hidden, heads, kv_heads, capacity;
    int narrow_first;  // norms round before they multiply with gamma
    int activation;    // enum Activation
    float eps, scale, softcap;  // softcap 0: none
    float query_eps;
    u64* trace;  // of the lab
};

enum Activation { SILU, GELU_TANH };
