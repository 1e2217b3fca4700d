#include "vectors512.inc"

namespace pipeedge::decoder {
namespace {

/// Rows of a tile register, and units of a row of it.
constexpr size_t kTileSide = 16;
constexpr size_t kRowBytes = 64;
constexpr size_t kStep = kColumns * kUnit;

/// What the tile registers hold, in the form in which the processor loads it: registers 0 to 3 are sums of rows 0 to 15
/// and 16 to 31 by both halves of the columns, 4 and 5 these rows, 6 and 7 the halves of the weights.
struct alignas(64) Configuration {
  explicit Configuration(size_t rows = 0) {
    const auto upper = static_cast<uint8_t>(rows < kTileSide ? rows : kTileSide);
    const auto lower = static_cast<uint8_t>(rows - upper);
    const uint8_t counts[8] = {upper, upper, lower, lower, upper, lower, kTileSide, kTileSide};
    for (size_t i = 0; i < 8; ++i) {
      row_counts[i] = counts[i];
      row_bytes[i] = counts[i] == 0 ? uint16_t{0} : uint16_t{kRowBytes};
    }
  }
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t row_counts[16] = {};
};
static_assert(sizeof(Configuration) == 64, "as the processor defines it");

template <bool kBoth>
void multiply_tiles(const Tile& tile) {
  const size_t stride = tile.sum_stride * sizeof(float);
  float* lower_sums = tile.sums + kTileSide * tile.sum_stride;
  if (tile.onto) {
    _tile_loadd(0, tile.sums, stride);
    _tile_loadd(1, tile.sums + kTileSide, stride);
    if (kBoth) {
      _tile_loadd(2, lower_sums, stride);
      _tile_loadd(3, lower_sums + kTileSide, stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (kBoth) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  const char* panel = tile.panel;
  const char* rows = tile.rows;
  const char* lower = rows + kTileSide * tile.row_stride;
  for (size_t u = 0; u < tile.units; u += kTileSide, panel += kTileSide * kStep, rows += kRowBytes) {
    if (!kBoth) {
#pragma GCC unroll 16
      for (size_t i = 0; i < kTileSide; ++i) fetch_ahead(panel + i * kStep);
    }
    _tile_loadd(4, rows, tile.row_stride);
    _tile_loadd(6, panel, kStep);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + kRowBytes, kStep);
    _tile_dpbf16ps(1, 4, 7);
    if (kBoth) {
      _tile_loadd(5, lower, tile.row_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      lower += kRowBytes;
    }
  }
  _tile_stored(0, tile.sums, stride);
  _tile_stored(1, tile.sums + kTileSide, stride);
  if (kBoth) {
    _tile_stored(2, lower_sums, stride);
    _tile_stored(3, lower_sums + kTileSide, stride);
  }
}

/// The configuration before the first product of a thread, and the rows that its own one is for.
struct State {
  Configuration before;
  size_t rows = 0;
};
thread_local State state;

/// Others in this process, such as oneDNN, count on their configuration being as they left it.
void begin() {
  _tile_storeconfig(&state.before);
  state.rows = 0;
}

void end() {
  if (state.before.palette == 0) {
    _tile_release();
  } else {
    _tile_loadconfig(&state.before);
  }
}

void multiply(const Tile& tile, size_t rows) {
  if (rows != state.rows) {
    const Configuration own(rows);
    _tile_loadconfig(&own);
    state.rows = rows;
  }
  if (rows > kTileSide) {
    multiply_tiles<true>(tile);
  } else {
    multiply_tiles<false>(tile);
  }
}

}  // namespace

const Product kHalvesAmx = {2 * kTileSide, multiply, begin, end};

}  // namespace pipeedge::decoder
