// Every codec. A codec has these members:
//
//   BITS           bits of a code
//   ROW_CHANNELS   channels of a stored row, and of a tile: 16, or 32 of which 16 are kept
//   SPARSE         whether two of every four channels are kept, whose places follow the codes
//   PLANES         planes of a tile in which a lane has LANE_BYTES (codec/lane_words.cuh); with places, a tile has TILE_BYTES
//   BLOCK_WORDS    words of a lane in a block of 16 columns
//   SUMS_CODES     whether it has codes(): codes that are multiplied without a subtraction
//   FUSES          whether it has factors() and scaled(): zero points and scales in one instruction
//   NORMALIZES     whether scales of FUSES need normalizers
//   dequantize     words of a block to operand A: value minus zero point, times 2^-STORED_POWER, exactly
//   weights        the same times scales, in 16 bits
//   STORED_POWER   scales are stored times 2^STORED_POWER, so that both are in the range of the element
#pragma once
#include "codec/e2m1.cuh"
#include "codec/e4m3.cuh"
#include "codec/int4.cuh"
#include "codec/int4_sparse.cuh"
#include "codec/int8.cuh"
