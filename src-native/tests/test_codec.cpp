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

Encoded encode(const Variant& variant, const Values& values, int bits, const Levels& levels) {
  Encoded encoded;
  encoded.codes.resize(packed_bytes(values.rows * values.length, bits));
  encoded.scales.resize(values.rows);
  encoded.offsets.resize(values.rows);
  encoded.bad_row =
      variant.encode(values, bits, levels, encoded.codes.data(), encoded.scales.data(), encoded.offsets.data());
  return encoded;
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
    std::vector<std::uint16_t> halves(data.size());
    for (std::size_t i = 0; i < data.size(); ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, &data[i], sizeof bits);
      halves[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    for (const int bits : kWidths) {
      const Values values = {data.data(), Element::kFloat32, rows, length};
      const Values small = {halves.data(), Element::kBfloat16, rows, length};
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
        std::vector<float> decoded(data.size());
        variant->decode(plain.codes.data(), plain.scales.data(), plain.offsets.data(), bits, Element::kFloat32, rows,
                        length, decoded.data());
        bool close = true;
        for (std::size_t i = 0; i < data.size(); ++i) {
          close = close && std::abs(decoded[i] - data[i]) <= 0.52F * plain.scales[i / length] + 1e-5F;
        }
        check(close, what + " comes back within half a step");
        std::vector<std::uint16_t> decoded_small(data.size());
        variant->decode(plain.codes.data(), plain.scales.data(), plain.offsets.data(), bits, Element::kBfloat16, rows,
                        length, decoded_small.data());
      }
    }
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
          const Encoded encoded = encode(*variant, {row.data(), Element::kFloat32, 1, row.size()}, bits, levels);
          std::vector<float> decoded(row.size());
          variant->decode(encoded.codes.data(), encoded.scales.data(), encoded.offsets.data(), bits,
                          Element::kFloat32, 1, row.size(), decoded.data());
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
        const Encoded encoded = encode(*variant, {data.data(), Element::kFloat32, 3, 50}, 4, {});
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
    for (const Variant* variant : variants()) {
      variant->decode(codes.data(), range, range + 1, 7, Element::kFloat32, 1, 100, values.data());
    }
  }
}

}  // namespace

int main() {
  test_round_trips();
  test_extremes();
  test_hostile_ranges();
  std::cout << (failures == 0 ? "all passed" : std::to_string(failures) + " failed") << '\n';
  return failures == 0 ? 0 : 1;
}
