// Tests of the codec alone, for builds that Python tests do not cover: -DNDEBUG, AddressSanitizer, UBSan.
// Python tests compare the codes with an independent implementation.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../codec/codec.hpp"

namespace {

using namespace pipeedge::codec;

int failures = 0;

void check(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::cerr << "FAILED: " << what << '\n';
}

/// Encodes into memory of exactly the right size, so that the sanitizer detects writes past its end.
struct Encoded {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales, offsets;
  std::size_t bad_row = kNone;
};

/// A transform with its own memory of exactly one row; none if `block` is 0.
struct Turned {
  std::vector<float> row;
  Transform transform;

  Turned(std::size_t block, std::size_t length) : row(block > 0 ? length : 0), transform{block, 5, row.data()} {}
};

template <typename T>
Encoded encode(const Variant& variant, const Rows<const T>& values, int bits, const Levels& levels,
               std::size_t block = 0) {
  const Turned turned(block, values.length);
  Encoded encoded;
  encoded.codes.resize(packed_bytes(values.rows * values.length, bits));
  encoded.scales.resize(values.rows);
  encoded.offsets.resize(values.rows);
  encoded.bad_row = variant.kernels(values.data)
                        .encode(values, bits, levels, turned.transform, encoded.codes.data(), encoded.scales.data(),
                                encoded.offsets.data());
  return encoded;
}

std::vector<float> decode(const Variant& variant, const Encoded& encoded, int bits, std::size_t length,
                          std::size_t block = 0) {
  const Turned turned(block, length);
  std::vector<float> values(encoded.scales.size() * length);
  variant.floats.decode(encoded.codes.data(), encoded.scales.data(), encoded.offsets.data(), bits, turned.transform,
                        {values.data(), encoded.scales.size(), length});
  return values;
}

const std::vector<int> kWidths = {2, 3, 4, 5, 6, 7, 8, 16};

void test_round_trips() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(1.0F, 3.0F);
  const std::vector<std::pair<std::size_t, std::size_t>> shapes = {
      {0, 0}, {3, 0}, {1, 1}, {7, 1}, {5, 3}, {2, 31}, {9, 33}, {1, 2047}, {1, 2048}, {1, 2049}, {3, 768}, {2, 9001}};
  for (const auto& [rows, length] : shapes) {
    std::vector<float> data(rows * length);
    std::generate(data.begin(), data.end(), [&] { return normal(random); });
    std::vector<Bfloat16> halves(data.size());
    for (std::size_t i = 0; i < data.size(); ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, &data[i], sizeof bits);
      halves[i].bits = static_cast<std::uint16_t>(bits >> 16);
    }
    for (const int bits : kWidths) {
      const Rows<const float> values = {data.data(), rows, length};
      const Rows<const Bfloat16> small = {halves.data(), rows, length};
      const Levels levels = {2.5, 4};
      const Encoded wanted = encode(*variants().back(), values, bits, levels);
      const Encoded wanted_small = encode(*variants().back(), small, bits, levels);
      for (const Variant* variant : variants()) {
        const std::string what = std::string(variant->name) + " " + std::to_string(rows) + "x" +
                                 std::to_string(length) + " at " + std::to_string(bits);
        const Encoded got = encode(*variant, values, bits, levels);
        check(got.bad_row == kNone && got.codes == wanted.codes && got.scales == wanted.scales &&
                  got.offsets == wanted.offsets,
              what + " is encoded as the portable variant does");
        check(encode(*variant, small, bits, levels).codes == wanted_small.codes, what + " of bfloat16 likewise");

        const Encoded plain = encode(*variant, values, bits, {});
        const std::vector<float> decoded = decode(*variant, plain, bits, length);
        bool close = true;
        for (std::size_t i = 0; i < data.size(); ++i) {
          close = close && std::abs(decoded[i] - data[i]) <= 0.52F * plain.scales[i / length] + 1e-5F;
        }
        check(close, what + " comes back within half a step");
        std::vector<Bfloat16> decoded_small(data.size());
        variant->bfloats.decode(plain.codes.data(), plain.scales.data(), plain.offsets.data(), bits, {},
                                {decoded_small.data(), rows, length});
      }
    }
  }
}

/// Rows of every length, so that blocks end with the row, before it, and beyond it. Each variant gives the same bits.
void test_transforms() {
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0.5F, 2.0F);
  const Variant& portable = *variants().back();
  for (std::size_t block = 2; block <= kMaxTransformBlock; block *= 2) {
    for (const std::size_t length : {1, 2, 3, 31, 64, 100, 256, 257, 767, 768, 1500, 2048}) {
      const std::size_t rows = 3;
      std::vector<float> data(rows * length);
      std::generate(data.begin(), data.end(), [&] { return normal(random); });
      const Rows<const float> values = {data.data(), rows, length};
      std::vector<float> wanted(data.size());
      portable.floats.transform(values, {block, 5, nullptr}, wanted.data());
      double before = 0, after = 0;
      for (const float x : data) before += static_cast<double>(x) * static_cast<double>(x);
      for (const float x : wanted) after += static_cast<double>(x) * static_cast<double>(x);
      const std::string what =
          std::to_string(rows) + "x" + std::to_string(length) + " in blocks of " + std::to_string(block);
      check(std::abs(after - before) <= 1e-5 * before, what + " keeps the sum of squares");
      for (const Variant* variant : variants()) {
        const std::string who = std::string(variant->name) + " " + what;
        std::vector<float> got(data.size());
        variant->floats.transform(values, {block, 5, nullptr}, got.data());
        check(std::memcmp(got.data(), wanted.data(), got.size() * sizeof(float)) == 0, who + " is the portable one");
        const Encoded encoded = encode(*variant, values, 16, {}, block);
        const std::vector<float> decoded = decode(*variant, encoded, 16, length, block);
        check(decoded == decode(portable, encode(portable, values, 16, {}, block), 16, length, block),
              who + " is decoded as the portable one");
        bool close = true;
        for (std::size_t i = 0; i < data.size(); ++i) close = close && std::abs(decoded[i] - data[i]) < 0.02F;
        check(close, who + " comes back");
      }
    }
  }
  const std::vector<float> large(64, 1e36F);
  for (const Variant* variant : variants()) {
    const Rows<const float> values = {large.data(), 2, 32};
    check(encode(*variant, values, 8, {}, 32).bad_row == 0, "a sum that may overflow is told");
    check(encode(*variant, values, 8, {}).bad_row == kNone, "which needs a transform");
  }
}

void test_extremes() {
  const float largest = std::numeric_limits<float>::max();
  const float tiniest = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> rows = {
      {largest, -largest, 0, 1}, {largest, largest, largest}, {tiniest, 0, -tiniest, 5 * tiniest}, {0, 0}, {-7.25F}};
  for (const auto& row : rows) {
    for (const int bits : kWidths) {
      for (const Variant* variant : variants()) {
        for (const Levels& levels : {Levels{}, Levels{1, 1}, Levels{0, 0}}) {
          const Encoded encoded = encode<float>(*variant, {row.data(), 1, row.size()}, bits, levels);
          const std::vector<float> decoded = decode(*variant, encoded, bits, row.size());
          for (const float value : decoded) check(std::isfinite(value), "an extreme row comes back finite");
        }
      }
    }
  }
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    for (std::size_t at = 0; at < 100; ++at) {
      std::vector<float> data(150, 1.5F);
      data[at] = bad;
      for (const Variant* variant : variants()) {
        const Encoded encoded = encode<float>(*variant, {data.data(), 3, 50}, 4, {});
        check(encoded.bad_row == at / 50, "the first bad row is told");
      }
    }
  }
}

/// With any ranges that a peer may send, the values are useless, but every write stays in bounds.
void test_hostile_ranges() {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    float range[2];
    for (float& value : range) {
      const auto bits = static_cast<std::uint32_t>(random());
      std::memcpy(&value, &bits, sizeof value);
      if (!std::isfinite(value)) value = 0;
    }
    std::vector<std::uint8_t> codes(packed_bytes(100, 7), 0xa5);
    std::vector<float> values(100);
    for (const std::size_t block : {0, 2, 64, 1024}) {
      const Turned turned(block, values.size());
      for (const Variant* variant : variants()) {
        variant->floats.decode(codes.data(), range, range + 1, 7, turned.transform, {values.data(), 1, values.size()});
      }
    }
  }
}

}  // namespace

int main() {
  test_round_trips();
  test_transforms();
  test_extremes();
  test_hostile_ranges();
  std::cout << (failures == 0 ? "all passed" : std::to_string(failures) + " failed") << '\n';
  return failures == 0 ? 0 : 1;
}
