// Tests of decoders' kernels alone, for builds that Python tests do not cover: AddressSanitizer and UBSan. Python tests
// compare the results of whole blocks with those of transformers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../decoder/stage.hpp"

namespace {

using namespace pipeedge::decoder;

int failures = 0;

void check(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::cerr << "FAILED: " << what << '\n';
}

const char* name_of(Type type) {
  constexpr const char* kNames[kTypes] = {"float32", "bfloat16", "int8", "int4"};
  return kNames[static_cast<std::size_t>(type)];
}

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 1000;
  return values;
}

bool same_bits(const float* one, const float* other, std::size_t count) {
  return std::memcmp(one, other, count * sizeof(float)) == 0;
}

/// A row alone has the bits that it has among others, and the product is that of the weights as they are stored.
void test_product(Type type, std::size_t rows, std::size_t inputs, std::size_t outputs) {
  const std::vector<float> weights = random_values(outputs * inputs, 1), x = random_values(rows * inputs, 2);
  Matrix matrix(type, outputs, inputs);
  matrix.pack(0, outputs, weights.data());
  std::vector<float> stored(inputs);
  for (const Variant& variant : variants()) {
    const std::string what = std::string(variant.name) + " " + name_of(type) + " " + std::to_string(rows) + "x" +
                             std::to_string(inputs) + "x" + std::to_string(outputs);
    const std::size_t stride = matrix.panels() * kColumns;
    Operand all;
    all.resize(type, rows, inputs);
    for (std::size_t r = 0; r < rows; ++r) all.set(variant, r, x.data() + r * inputs);
    std::vector<float> found(rows * stride);
    matrix.multiply(variant, all, 0, rows, 0, matrix.panels(), found.data(), stride);
    bool close = true, alone_too = true;
    for (std::size_t r = 0; r < rows; ++r) {
      Operand one;
      one.resize(type, 1, inputs);
      one.set(variant, 0, x.data() + r * inputs);
      std::vector<float> alone(stride);
      matrix.multiply(variant, one, 0, 1, 0, matrix.panels(), alone.data(), stride);
      alone_too = alone_too && same_bits(alone.data(), found.data() + r * stride, outputs);
    }
    const double margin = type == Type::kFloat32 ? 1e-5 : 2e-2;
    for (std::size_t n = 0; n < outputs; ++n) {
      matrix.unpack(n, stored.data());
      for (std::size_t r = 0; r < rows; ++r) {
        double wanted = 0;
        for (std::size_t k = 0; k < inputs; ++k) {
          wanted += static_cast<double>(stored[k]) * static_cast<double>(x[r * inputs + k]);
        }
        const double off = std::abs(wanted - static_cast<double>(found[r * stride + n]));
        close = close && off <= margin * std::sqrt(static_cast<double>(inputs));
      }
    }
    check(close, what + " is close");
    check(alone_too, what + " is the same alone");
  }
}

/// All variants round weights to 4 bits alike, with codes and zeros that are in range.
void test_fit() {
  std::vector<float> weights = random_values(kGroup * kColumns, 5);
  for (std::size_t k = 0; k < kGroup; ++k) {
    weights[k * kColumns + 1] = 0;
    weights[k * kColumns + 2] = 0.75F;
    weights[k * kColumns + 3] = k == 7 ? -40.0F : weights[k * kColumns + 3];
  }
  std::vector<std::uint8_t> first_codes, first_zeros;
  std::vector<Half> first_scales;
  for (const Variant& variant : variants()) {
    std::vector<std::uint8_t> codes(kGroup * kColumns), zeros(kColumns);
    std::vector<Half> scales(kColumns);
    variant.fit(weights.data(), codes.data(), scales.data(), zeros.data());
    if (first_codes.empty()) std::tie(first_codes, first_zeros, first_scales) = std::tie(codes, zeros, scales);
    check(codes == first_codes && zeros == first_zeros && scales == first_scales,
          std::string(variant.name) + " fits as the others do");
    check(*std::max_element(codes.begin(), codes.end()) <= kMostNibble, "codes have 4 bits");
    check(*std::max_element(zeros.begin(), zeros.end()) <= kMostZero, "zeros are in the range");
  }
}

/// All variants round groups to 8 bits alike, and to the nearest code; one that is not finite becomes NaN.
void test_encode() {
  constexpr std::size_t kGroups = 5, kBroken = 3, kColumn = 9;
  std::vector<float> weights = random_values(kGroups * kGroup, 6);
  weights[5] = -40.0F;
  weights[kBroken * kGroup + 7] = std::numeric_limits<float>::infinity();
  std::vector<PanelGroup> wanted;
  for (const Variant& variant : variants()) {
    std::vector<PanelGroup> groups(kGroups);
    const bool finite = variant.encode(weights.data(), kBroken, kColumn, groups.data());
    const bool rest = variant.encode(weights.data() + kBroken * kGroup, kGroups - kBroken, kColumn, &groups[kBroken]);
    check(finite && !rest, std::string(variant.name) + " finds what is not finite");
    if (wanted.empty()) wanted = groups;
    bool same = true, nearest = true;
    for (std::size_t g = 0; g < kGroups; ++g) {
      const Half scale = groups[g].scales[kColumn];
      const WeightCode* codes = groups[g].codes[kColumn];
      same = same && scale == wanted[g].scales[kColumn] && std::equal(codes, codes + kGroup, wanted[g].codes[kColumn]);
      if (g == kBroken) {
        nearest = nearest && scale == kNotANumber && std::count(codes, codes + kGroup, kZero) == kGroup;
        continue;
      }
      const double step = std::ldexp(128 + (scale & 127), (scale >> 7) - 134);
      for (std::size_t k = 0; k < kGroup; ++k) {
        const double off = static_cast<double>(weights[g * kGroup + k]) - (codes[k] - kZero) * step;
        nearest = nearest && std::abs(off) <= 0.5001 * step;
      }
    }
    check(same, std::string(variant.name) + " rounds to 8 bits as the others do");
    check(nearest, std::string(variant.name) + " rounds to the nearest code of 8 bits");
  }
}

/// Weights are those of a softmax before it is divided by their sum, of which the largest is 1. They all are NaN if a
/// score that counts is one, wherever it is.
void test_weigh() {
  constexpr std::size_t kCount = 3 * kColumns;
  constexpr std::pair<std::size_t, std::size_t> kRanges[] = {{0, kCount}, {5, 2 * kColumns + 3}, {40, 41}};
  const std::vector<float> drawn = random_values(kCount, 7);
  for (const Variant& variant : variants()) {
    for (const auto& [begin, end] : kRanges) {
      const auto weigh = [&, begin = begin, end = end](std::vector<float>& values) {
        Scores scores;
        scores.values = values.data();
        scores.count = kCount;
        scores.begin = begin;
        scores.end = end;
        scores.scale = 3;
        return variant.weigh(scores);
      };
      const double most = 3 * static_cast<double>(*std::max_element(drawn.begin() + static_cast<std::ptrdiff_t>(begin),
                                                                   drawn.begin() + static_cast<std::ptrdiff_t>(end)));
      bool close = true, broken = true;
      // What does not count may be anything.
      for (std::size_t at = 0; at <= kCount; ++at) {
        std::vector<float> values = drawn;
        if (at < kCount) values[at] = std::numeric_limits<float>::quiet_NaN();
        const float sum = weigh(values);
        if (begin <= at && at < end) {
          broken = broken && std::isnan(sum) && std::all_of(values.begin(), values.end(), [](float x) {
                     return std::isnan(x);
                   });
          continue;
        }
        double wanted_sum = 0;
        for (std::size_t i = 0; i < kCount; ++i) {
          const bool counts = begin <= i && i < end;
          const double wanted = counts ? std::exp(3 * static_cast<double>(drawn[i]) - most) : 0;
          close = close && std::abs(static_cast<double>(values[i]) - wanted) <= 1e-6;
          wanted_sum += wanted;
        }
        close = close && std::abs(static_cast<double>(sum) - wanted_sum) <= 1e-5 * wanted_sum;
      }
      const std::string what =
          std::string(variant.name) + ", scores " + std::to_string(begin) + " to " + std::to_string(end);
      check(close, what + " become weights");
      check(broken, what + " with NaN become NaN");
    }
  }
}

/// Rows that are mixed together have the bits that each has alone, and are sums of the values.
void test_mix(Type type) {
  constexpr std::size_t kMost = 19, kWidth = 2 * kColumns, kBegin = 3, kEnd = 29;
  const std::vector<float> weights = random_values(kMost * kColumns, 8), values = random_values(kColumns * kWidth, 9);
  const std::vector<float> before = random_values(kMost * kWidth, 10);
  std::vector<Half> halves(values.size());
  variants().back().narrow(values.data(), values.size(), halves.data());
  for (const Variant& variant : variants()) {
    for (std::size_t rows = 1; rows <= kMost; ++rows) {
      Mixture mixture;
      mixture.weight_stride = kColumns;
      mixture.values = type == Type::kFloat32 ? reinterpret_cast<const char*>(values.data())
                                              : reinterpret_cast<const char*>(halves.data());
      mixture.width = kWidth;
      mixture.type = type;
      mixture.begin = kBegin;
      mixture.end = kEnd;
      mixture.sum_stride = kWidth;
      std::vector<float> together = before, alone = before;
      mixture.weights = weights.data();
      mixture.sums = together.data();
      variant.mix(mixture, rows);
      bool close = true;
      for (std::size_t r = 0; r < rows; ++r) {
        mixture.weights = weights.data() + r * kColumns;
        mixture.sums = alone.data() + r * kWidth;
        variant.mix(mixture, 1);
        for (std::size_t e = 0; e < kWidth; ++e) {
          double wanted = static_cast<double>(before[r * kWidth + e]);
          for (std::size_t t = kBegin; t < kEnd; ++t) {
            wanted += static_cast<double>(weights[r * kColumns + t]) * static_cast<double>(values[t * kWidth + e]);
          }
          const double margin = type == Type::kFloat32 ? 1e-5 : 5e-2;
          close = close && std::abs(static_cast<double>(together[r * kWidth + e]) - wanted) <= margin;
        }
      }
      const std::string what = std::string(variant.name) + " " + name_of(type) + ", " + std::to_string(rows) + " rows";
      check(close, what + " are mixed");
      // Nor are rows behind them touched.
      check(same_bits(together.data(), alone.data(), kMost * kWidth), what + " are mixed as each alone");
    }
  }
}

/// All variants read a form alike, and a matrix is the same when its rows come in parts that do not fill panels.
void test_form(const Coding& portable, std::size_t number) {
  constexpr std::size_t kInputs = 2 * kSuper, kOutputs = 40;
  const std::size_t row_bytes = kInputs / portable.values * portable.bytes;
  std::vector<std::uint8_t> rows(kOutputs * row_bytes);
  std::mt19937 random(7);
  for (std::uint8_t& byte : rows) byte = static_cast<std::uint8_t>(random());
  // The upper bytes of scales, without the bit that the largest exponents have.
  for (std::size_t i = 1; i < rows.size(); ++i) {
    if (i % portable.bytes % 2 == 1) rows[i] = static_cast<std::uint8_t>(rows[i] & 0xbf);
  }
  for (const Variant& variant : variants()) {
    const Coding& coding = variant.codings[number];
    const std::string what = std::string(variant.name) + " reads " + portable.name + " as the others do";
    std::vector<float> found(kSuper), wanted(kSuper);
    ByteGroup bytes, same_bytes;
    NibbleGroup nibbles, same_nibbles;
    for (std::size_t at = 0; at < rows.size(); at += coding.bytes) {
      coding.decode(&rows[at], found.data());
      portable.decode(&rows[at], wanted.data());
      check(same_bits(found.data(), wanted.data(), kSuper), what);
    }
    for (std::size_t g = 0; g < kInputs / kGroup; ++g) {
      if (coding.bytes_of != nullptr) {
        coding.bytes_of(rows.data(), g, bytes);
        portable.bytes_of(rows.data(), g, same_bytes);
        check(std::memcmp(&bytes, &same_bytes, sizeof bytes) == 0, what + " in 8 bits");
      }
      if (coding.nibbles_of != nullptr) {
        const bool fits = coding.nibbles_of(rows.data(), g, nibbles);
        check(portable.nibbles_of(rows.data(), g, same_nibbles) == fits, what + " where they fit 4 bits");
        check(!fits || std::memcmp(&nibbles, &same_nibbles, sizeof nibbles) == 0, what + " in 4 bits");
      }
    }
  }
  for (const Type type : {Type::kFloat32, Type::kBfloat16, Type::kInt8, Type::kInt4}) {
    Matrix whole(type, kOutputs, kInputs), parts(type, kOutputs, kInputs);
    whole.pack(0, kOutputs, *find_coding(portable.name), rows.data());
    for (const std::size_t first : {37, 0, 7}) {
      const std::size_t count = first == 37 ? 3 : first == 0 ? 7 : 30;
      parts.pack(first, count, *find_coding(portable.name), &rows[first * row_bytes]);
    }
    std::vector<float> found(kInputs), wanted(kInputs);
    bool same = true;
    for (std::size_t n = 0; n < kOutputs; ++n) {
      parts.unpack(n, found.data());
      whole.unpack(n, wanted.data());
      same = same && same_bits(found.data(), wanted.data(), kInputs);
    }
    check(same, std::string(portable.name) + " in parts is the same in " + name_of(type));
  }
}

/// A chunk of rows gives the bits of its rows one after the other, in any number of threads. With an inner width of
/// 1700, a chunk of 70 rows is worth two threads.
void test_steps(Type weights, std::size_t window, std::size_t head_size, std::size_t inner) {
  const std::size_t rows = 70, hidden = 48, threads = 3, pages = 3;
  const auto run = [&](const Variant& variant, std::size_t chunk, std::size_t in_threads) {
    Settings settings;
    settings.hidden = hidden;
    settings.heads = 4;
    settings.kv_heads = 2;
    settings.head_size = head_size;
    settings.inner = inner;
    settings.weights = weights;
    settings.stream = weights == Type::kFloat32 ? Type::kFloat32 : Type::kBfloat16;
    settings.scale = 0.3F;
    settings.score_cap = window == 0 ? 0.0F : 20.0F;
    settings.eps = 1e-6F;
    settings.rotations.resize(1);
    settings.rotations[0].frequencies.assign(head_size / 2, 0.3F);
    std::vector<Block> blocks(2);
    for (Block& block : blocks) {
      block.window = window;
      block.rotation = 0;
    }
    Stage stage(settings, std::move(blocks), 0, 2 * kLayers, pages, pages);
    for (std::size_t b = 0; b < 2; ++b) {
      Block& block = stage.block(b);
      unsigned seed = 3;
      for (Matrix* matrix : {&block.qkv, &block.proj, &block.gate, &block.up, &block.down}) {
        const std::vector<float> values = random_values(matrix->outputs() * matrix->inputs(), seed++);
        matrix->pack(0, matrix->outputs(), values.data());
      }
      block.attention_norm.assign(hidden, 1.0F);
      block.mlp_norm.assign(hidden, 1.0F);
    }
    std::vector<float> x = random_values(rows * hidden, 9);
    std::vector<Half> halves(rows * hidden);
    variant.narrow(x.data(), halves.size(), halves.data());
    const std::int32_t numbers[pages] = {2, 0, 1};
    for (std::size_t row = 0; row < rows; row += chunk) {
      Sequence one;
      one.pages = one.window_pages = numbers;
      one.page_count = one.window_page_count = pages;
      one.position = row;
      one.rows = std::min(chunk, rows - row);
      void* at = weights == Type::kFloat32 ? static_cast<void*>(x.data() + row * hidden) : halves.data() + row * hidden;
      stage.step(variant, {one}, {at, nullptr}, {at, nullptr}, in_threads);
    }
    std::vector<char> bytes(rows * hidden * (weights == Type::kFloat32 ? sizeof(float) : sizeof(Half)));
    std::memcpy(bytes.data(), weights == Type::kFloat32 ? static_cast<void*>(x.data()) : halves.data(), bytes.size());
    return bytes;
  };
  for (const Variant& variant : variants()) {
    const std::vector<char> alone = run(variant, 1, 1);
    for (const std::size_t chunk : {7, 33, 70}) {
      check(run(variant, chunk, threads) == alone, std::string(variant.name) + " " + name_of(weights) + " chunks of " +
                                                       std::to_string(chunk) + ", window " + std::to_string(window));
    }
  }
}

/// Small pieces of memory are of value 0, apart, and remain what they are while others go and come.
void test_memory() {
  constexpr std::size_t kPieces = 300, kBytes = 300000;
  std::vector<Memory> pieces;
  const auto is_all = [](const Memory& piece, char value) {
    return std::all_of(piece.data(), piece.data() + piece.bytes(), [&](char found) { return found == value; });
  };
  const auto add = [&](char value) {
    pieces.push_back(Memory::among_others(kBytes));
    if (!is_all(pieces.back(), 0)) return false;
    std::fill_n(pieces.back().data(), kBytes, value);
    return true;
  };
  bool empty = true, kept = true;
  for (std::size_t n = 0; n < kPieces; ++n) empty = add(static_cast<char>(1 + n % 100)) && empty;
  // The last ones are in a page that is not full.
  for (std::size_t n = kPieces / 4; n < kPieces / 2; ++n) pieces[n] = Memory();
  for (std::size_t n = 3 * kPieces / 4; n < kPieces; ++n) pieces[n] = Memory();
  for (std::size_t n = 0; n < kPieces / 2; ++n) empty = add(101) && empty;
  for (std::size_t n = 0; n < kPieces; ++n) kept = kept && is_all(pieces[n], static_cast<char>(1 + n % 100));
  check(empty, "small pieces of memory are of value 0");
  check(kept, "small pieces of memory keep their values");
}

}  // namespace

int main() {
  test_memory();
  test_fit();
  test_encode();
  test_weigh();
  test_mix(Type::kFloat32);
  test_mix(Type::kBfloat16);
  for (std::size_t i = 0; variants().back().codings[i].name != nullptr; ++i) {
    test_form(variants().back().codings[i], i);
  }
  for (const Type type : {Type::kFloat32, Type::kBfloat16, Type::kInt8, Type::kInt4}) {
    test_product(type, 1, 1, 1);
    test_product(type, 5, 33, 31);
    test_product(type, 70, 100, 65);
    test_product(type, 200, 2100, 33);
    test_steps(type, 0, 16, 1700);
    test_steps(type, 5, 80, 40);
  }
  std::cout << (failures == 0 ? "all passed" : std::to_string(failures) + " failed") << '\n';
  return failures == 0 ? 0 : 1;
}
