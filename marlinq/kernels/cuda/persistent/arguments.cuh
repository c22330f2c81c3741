// Parameters of the persistent kernel; equal structures are in launch/persistent/memory.py.
#pragma once
#include "ptx/tensor_copy.cuh"

enum Product { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };
constexpr int WIDTHS = 3;  // widths of sets of tiles: 1, 2 and 4 tiles

// One layer, in global memory.
struct StepLayer {
    TensorMap words[PRODUCTS][WIDTHS], scales[PRODUCTS][WIDTHS], zeros[PRODUCTS][WIDTHS];  // boxes of 1, 2, 4 tiles
    TensorMap keys, values;                                        // [KV * L, D], boxes of 64 channels of a chunk's positions
    const float* attention_gamma;                                  // [H]
    const float* mlp_gamma;                                        // [H]
    const float* post_gamma[2];  // [H] gammas of the norms behind o and down, or null
    const float* query_gamma;  // [D], or null where queries and keys have no norm
    const float* key_gamma;    // [D], or null
    const float* cosines;  // [positions, D / 2]
    const float* sines;    // [positions, D / 2]
    const u16* bias[PRODUCTS];  // [N], or null
    u16* key_cache;             // [KV, L, D]
    u16* value_cache;           // [KV, L, D]
    int window;  // positions that a query sees at most, its own included; 0: all
    int padding[19];  // tensor maps of the next layer lie at a multiple of 64 bytes
};

// Sizes of a product, the same in all layers.
struct ProductShape {
    int channels;           // K
    int tiles;              // N / 64
    int box_units[WIDTHS];  // units of 128 channels that a copy brings
};

struct StepArguments {
    const StepLayer* layers;
    const int* length;   // [1] positions in the cache
    u16* result;         // [H]
    // Messages.
    float* parts[PRODUCTS];         // [PARTS, N] sums of a part of K
    float* attention;               // [MAX_SPLITS, heads * D] outputs of a part of the context
    float* attention_weight;        // [MAX_SPLITS, heads] weights of these outputs, as logarithms to base 2
    float* mlp;                     // [I] the input of down
    float* start;                   // [H] the hidden state that the step begins with, of round 0
    float* squares[2];              // [groups][H / 128] sums of squares of the residual stream, in front of qkv and gate_up
    float* post_squares[2];         // [groups][H / 128] sums of squares of o's and down's results, where norms follow them
    float* arrivals;                // [blocks] sent by a block when it has reached gate_up
    ProductShape shape[PRODUCTS];
    int layer_count, hidden, heads, kv_heads, capacity;
    int narrow_first;  // norms round before they multiply with gamma
    int activation;    // enum Activation
    float eps, scale, softcap;  // softcap 0: none
    float query_eps;
};

enum Activation { SILU, GELU_TANH };
