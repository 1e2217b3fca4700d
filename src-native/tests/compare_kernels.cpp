// Computes random cases with all instruction sets of this processor, which must agree to the bit, and prints a digest
// for processors of other kinds to compare: a program, for tests/ranks/test_arm_kernels.py.
//
//   compare_kernels FIRST END              cases of integers, codes and sums in one order: a line for each kernel with
//                                          its digest and its instruction sets
//   compare_kernels FIRST END BEGINNING    attention, which is close only: writes its results as float32, to files
//                                          BEGINNING.float32 and BEGINNING.bfloat16
//
// A case depends on its number alone. Sizes are near the borders of tiles, groups and panels more often than by chance.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../attention/attention.hpp"
#include "../codec/codec.hpp"
#include "../decoder/stage.hpp"
#include "../linear8/linear8.hpp"

namespace {

namespace attention = pipeedge::attention;
namespace codec = pipeedge::codec;
namespace decoder = pipeedge::decoder;
namespace linear8 = pipeedge::linear8;

using Half = std::uint16_t;

/// Draws what is random. Distributions of the standard library differ by library.
class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}
  std::size_t below(std::size_t end) { return random_() % end; }
  bool maybe() { return below(2) == 0; }
  std::size_t size(std::size_t most) { return 1 + below(most); }
  /// A size up to about `most`, every second time one beside a multiple of `border`.
  std::size_t size(std::size_t most, std::size_t border) {
    if (maybe()) return size(most);
    const std::size_t near = (1 + below(std::max<std::size_t>(1, most / border))) * border;
    return near - 1 + below(3);
  }
  /// A multiple of 2^-12 from -4 to 4, which no function of a library has rounded.
  float number() { return static_cast<float>(static_cast<int>(below(1U << 15)) - (1 << 14)) / 4096; }
  /// The bits of a bfloat16 of moderate size and either sign.
  Half half() { return static_cast<Half>((0x3e00 + below(0x280)) | below(2) << 15); }
  std::uint8_t byte() { return static_cast<std::uint8_t>(below(256)); }

  std::vector<float> numbers(std::size_t count) {
    return many<float>(count, [&] { return number(); });
  }
  std::vector<Half> halves(std::size_t count) {
    return many<Half>(count, [&] { return half(); });
  }
  template <typename Value, typename One>
  std::vector<Value> many(std::size_t count, const One& one) {
    std::vector<Value> values(count);
    std::generate(values.begin(), values.end(), one);
    return values;
  }

 private:
  std::mt19937 random_;
};

/// What a kernel gave for a case.
class Bytes {
 public:
  template <typename Value>
  Bytes& add(const std::vector<Value>& values) {
    const auto* from = reinterpret_cast<const std::uint8_t*>(values.data());
    bytes_.insert(bytes_.end(), from, from + values.size() * sizeof(Value));
    return *this;
  }
  const std::vector<std::uint8_t>& all() const { return bytes_; }

 private:
  std::vector<std::uint8_t> bytes_;
};

/// Digests by kernel, with the instruction sets that gave them.
class Digests {
 public:
  /// Adds results of a case, which must be those of the instruction sets before.
  void add(const std::string& kernel, const std::string& variant, const std::string& what, const Bytes& bytes) {
    Kernel& own = kernels_[kernel];
    if (std::find(own.variants.begin(), own.variants.end(), variant) == own.variants.end()) {
      own.variants.push_back(variant);
    }
    if (variant != own.variants.front()) {
      if (bytes.all() == own.last) return;
      throw std::runtime_error(kernel + ", " + what + ": " + variant + " differs from " + own.variants.front());
    }
    // FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/
    for (const std::uint8_t byte : bytes.all()) own.digest = (own.digest ^ byte) * 0x100000001b3U;
    own.last = bytes.all();
  }

  void print() const {
    for (const auto& [name, kernel] : kernels_) {
      std::cout << name << ' ' << std::hex << std::setw(16) << std::setfill('0') << kernel.digest;
      for (const std::string& variant : kernel.variants) std::cout << ' ' << variant;
      std::cout << '\n';
    }
  }

 private:
  struct Kernel {
    std::vector<std::string> variants;
    std::uint64_t digest = 0xcbf29ce484222325U;
    std::vector<std::uint8_t> last;
  };
  std::map<std::string, Kernel> kernels_;
};

std::string by(std::size_t rows, std::size_t inputs, std::size_t outputs) {
  return std::to_string(rows) + "x" + std::to_string(inputs) + "x" + std::to_string(outputs);
}

/// A linear layer in 8 bits.
void compare_layers(Draw draw, Digests* digests) {
  const bool many = draw.below(50) == 0;
  const std::size_t rows = many ? 80 + draw.size(120) : draw.size(20), inputs = draw.size(100, 16);
  const std::size_t outputs = draw.size(70, linear8::kColumns);
  const auto weights = draw.many<std::int8_t>(
      outputs * inputs, [&] { return static_cast<std::int8_t>(static_cast<int>(draw.below(255)) - 127); });
  const std::vector<Half> x = draw.halves(rows * inputs), weight = draw.halves(inputs), shift = draw.halves(inputs);
  const std::vector<Half> bias = draw.halves(outputs), residual = draw.halves(rows * outputs);
  const auto scales = draw.many<float>(outputs, [&] { return static_cast<float>(1 + draw.below(4096)) / (1U << 20U); });
  linear8::Norm norm;
  if (draw.maybe()) norm = {weight.data(), shift.data(), 1e-6F};
  std::vector<Half> out(rows * outputs);
  linear8::Finish finish;
  finish.scales = scales.data();
  finish.bias = bias.data();
  finish.activation = static_cast<linear8::Activation>(draw.below(3));
  finish.residual = draw.maybe() ? residual.data() : nullptr;
  finish.out = out.data();
  finish.outputs = outputs;
  for (const linear8::Variant* variant : linear8::variants()) {
    if (variant->tile_rows == 0) continue;
    std::vector<std::int8_t> packed(linear8::packed_bytes(*variant, outputs, inputs));
    linear8::pack(*variant, weights.data(), outputs, inputs, packed.data());
    linear8::apply(*variant, x.data(), rows, inputs, norm, packed.data(), finish, 1);
    digests->add("layer", variant->name, by(rows, inputs, outputs), Bytes().add(out));
  }
}

/// The codes of some rows, and what they decode to.
void compare_codes(Draw draw, Digests* digests) {
  constexpr int kWidths[] = {2, 3, 4, 5, 6, 7, 8, 16};
  constexpr std::size_t kBlocks[] = {0, 0, 2, 16, 64, 256};
  const std::size_t rows = draw.size(5);
  const std::size_t length = draw.below(50) == 0 ? codec::kBlock - 20 + draw.size(40) : draw.size(300, 16);
  const int bits = kWidths[draw.below(8)];
  const std::size_t block = kBlocks[draw.below(6)];
  codec::Levels levels;
  if (draw.maybe()) levels.low = 1.5;
  if (draw.maybe()) levels.high = 1.5;
  const std::vector<float> values = draw.numbers(rows * length);
  std::vector<float> row(length), scales(rows), offsets(rows), decoded(values.size());
  const codec::Transform transform = {block, 7, row.data()};
  for (const codec::Variant* variant : codec::variants()) {
    std::vector<std::uint8_t> codes(codec::packed_bytes(values.size(), bits));
    const codec::Kernels<float>& kernels = variant->floats;
    kernels.encode({values.data(), rows, length}, bits, levels, transform, codes.data(), scales.data(), offsets.data());
    kernels.decode(codes.data(), scales.data(), offsets.data(), bits, transform, {decoded.data(), rows, length});
    digests->add("codes", variant->name, by(rows, length, static_cast<std::size_t>(bits)),
                 Bytes().add(codes).add(scales).add(offsets).add(decoded));
  }
}

std::size_t count_forms() {
  std::size_t count = 0;
  while (decoder::best_variant().codings[count].name != nullptr) ++count;
  return count;
}

/// Rows in a form of files with any codes, whose scales are of usual sizes.
std::vector<std::uint8_t> coded_rows(const decoder::Coding& coding, std::size_t units, Draw* draw) {
  auto bytes = draw->many<std::uint8_t>(units * coding.bytes, [&] { return draw->byte(); });
  const std::string name = coding.name;
  const bool own = name == "int8" || name == "int4", has_offset = name.back() == '1' || name.back() == 'K';
  for (std::size_t unit = 0; unit < units; ++unit) {
    std::uint8_t* at = bytes.data() + unit * coding.bytes;
    // float16 from 2^-13 to 2^-4, or bfloat16 from 2^-13 to 2^-2; our own are above 0.
    const auto put = [&](std::size_t place) {
      const std::size_t bits = own ? 0x3900 + draw->below(0x580) : (0x800 + draw->below(0x2400)) | draw->below(2) << 15;
      const auto scale = static_cast<Half>(bits);
      std::memcpy(at + place, &scale, sizeof scale);
    };
    put(name == "Q6_K" ? coding.bytes - sizeof(Half) : 0);
    if (has_offset && name != "Q6_K") put(sizeof(Half));
    if (name == "int4") at[sizeof(Half)] = static_cast<std::uint8_t>(draw->below(decoder::kMostZero + 1));
    if (name == "int8" || name == "Q8_0") {  // no code is -128
      std::replace(at + sizeof(Half), at + coding.bytes, std::uint8_t{128}, std::uint8_t{129});
    }
  }
  return bytes;
}

/// Adds what a stage keeps of the rows that `pack` writes to a matrix.
template <typename Pack>
void keep(std::size_t rows, std::size_t width, decoder::Type type, Bytes* bytes, const Pack& pack) {
  decoder::Matrix matrix(type, rows, width);
  pack(&matrix);
  std::vector<std::uint8_t> kept(width / decoder::kGroup * decoder::kByteGroupBytes);
  for (std::size_t row = 0; row < rows; ++row) {
    matrix.store_row(row, kept.data());
    bytes->add(kept);
  }
}

/// The weights of rows of files, and what a stage keeps of them: from the rows, and rounded anew from their weights.
void compare_forms(Draw draw, Digests* digests) {
  const std::size_t forms = count_forms(), form = draw.below(forms), rows = draw.size(3);
  const decoder::Coding& best = decoder::best_variant().codings[form];
  const std::size_t width = best.values;
  const std::vector<std::uint8_t> given = coded_rows(best, rows, &draw);
  const bool rounds = draw.below(16) == 0;  // to 4 bits, which takes long
  for (const decoder::Variant& variant : decoder::variants()) {
    const decoder::Coding& coding = variant.codings[form];
    std::vector<float> weights(rows * width);
    for (std::size_t row = 0; row < rows; ++row) {
      coding.decode(given.data() + row * coding.bytes, weights.data() + row * width);
    }
    Bytes bytes;
    bytes.add(weights);
    for (const decoder::Type type : {decoder::Type::kInt8, decoder::Type::kInt4}) {
      keep(rows, width, type, &bytes, [&](decoder::Matrix* matrix) { matrix->pack(0, rows, coding, given.data()); });
      if (type == decoder::Type::kInt4 && !rounds) continue;
      keep(rows, width, type, &bytes, [&](decoder::Matrix* matrix) { matrix->pack(0, rows, weights.data()); });
    }
    digests->add("forms", variant.name, std::string(coding.name) + " " + std::to_string(rows), bytes);
  }
}

/// The scores of some rows by the head of a decoder. Each row has the same bits alone.
void compare_scores(Draw draw, const std::string& name, decoder::Type type, Digests* digests) {
  // Seldom: many rows, or more inputs than are multiplied at once.
  constexpr std::size_t kMany = 190, kUnitsAtOnce = 512;
  const std::size_t values = type == decoder::Type::kFloat32 ? 1 : type == decoder::Type::kBfloat16 ? 2 : 4;
  const std::size_t kind = draw.below(100);
  const std::size_t rows = kind == 0 ? kMany + draw.size(10) : kind == 1 ? 23 + draw.size(5) : draw.size(30);
  const std::size_t inputs = kind == 0   ? draw.size(40)
                             : kind == 1 ? kUnitsAtOnce * values - 40 + draw.size(80)
                                         : draw.size(100, decoder::kGroup);
  const std::size_t outputs = draw.size(kind < 2 ? 33 : 70, decoder::kColumns);
  const bool centred = draw.maybe();
  decoder::Head head(type, decoder::Type::kFloat32, inputs, outputs, centred, 1e-6F, 0.5F, draw.maybe() ? 30.0F : 0);
  // To round weights to 4 bits takes long: usually codes are given.
  if (type == decoder::Type::kInt4 && draw.below(20) != 0) {
    const decoder::Coding& coding = *decoder::find_coding("int4");
    const std::size_t units = outputs * ((inputs + decoder::kGroup - 1) / decoder::kGroup);
    head.matrix().pack(0, outputs, coding, coded_rows(coding, units, &draw).data());
  } else {
    head.matrix().pack(0, outputs, draw.numbers(outputs * inputs).data());
  }
  if (draw.maybe()) head.norm() = draw.numbers(centred ? 2 * inputs : inputs);
  if (draw.maybe()) head.bias() = draw.numbers(outputs);
  const std::vector<float> hidden = draw.numbers(rows * inputs);
  const std::size_t row = draw.below(rows);
  std::vector<float> scores(rows * outputs), alone(outputs);
  for (const decoder::Variant& variant : decoder::variants()) {
    const std::string own = variant.name;
    if (own == "portable") continue;  // does not fuse products and sums on all machines
    head.score(variant, hidden.data(), rows, scores.data(), 1);
    head.score(variant, hidden.data() + row * inputs, 1, alone.data(), 1);
    const std::string what = by(rows, inputs, outputs);
    if (std::memcmp(alone.data(), scores.data() + row * outputs, outputs * sizeof(float)) != 0) {
      throw std::runtime_error(name + ", " + what + ": row " + std::to_string(row) + " differs alone with " + own);
    }
    // Instructions for products of bfloat16 round in their own ways.
    if (type == decoder::Type::kBfloat16 && (own == "amxbf16" || own == "avx512bf16" || own == "neonbf16")) continue;
    digests->add(name, own, what, Bytes().add(scores));
  }
}

void compare_all(unsigned first, unsigned end) {
  Digests digests;
  for (unsigned number = first; number < end; ++number) {
    try {
      const Draw draw(number);
      compare_layers(draw, &digests);
      compare_codes(draw, &digests);
      compare_forms(draw, &digests);
      compare_scores(draw, "score4", decoder::Type::kInt4, &digests);
      compare_scores(draw, "score8", decoder::Type::kInt8, &digests);
      compare_scores(draw, "score16", decoder::Type::kBfloat16, &digests);
      compare_scores(draw, "score32", decoder::Type::kFloat32, &digests);
    } catch (const std::exception& error) {
      throw std::runtime_error("case " + std::to_string(number) + ": " + error.what());
    }
  }
  digests.print();
}

float widened(float value) { return value; }
float widened(Half half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Attention of a small shape, with biases, rotations and windows.
template <typename Value>
void attend(Draw draw, std::ofstream* out) {
  attention::Problem<Value> problem;
  problem.heads = draw.size(3);
  problem.head_size = attention::kHeadMultiple * draw.size(5);
  problem.items = draw.size(2);
  problem.tokens = draw.size(70);
  const std::size_t count = problem.items * problem.tokens * problem.heads * problem.head_size;
  std::vector<Value> qkv;
  if (draw.maybe()) problem.reach = draw.size(40);
  for (const Half half : draw.halves(3 * count)) {
    if constexpr (sizeof(Value) == sizeof(float)) {
      qkv.push_back(widened(half));
    } else {
      qkv.push_back(half);
    }
  }
  const std::vector<float> bias = draw.numbers(problem.items * problem.tokens);
  const std::vector<float> distances = draw.numbers(problem.heads * (2 * problem.tokens - 1));
  // Any factors will do for a rotation.
  const auto factors = [&] {
    return draw.many<float>(problem.tokens * problem.head_size / 2, [&] { return draw.number() / 4; });
  };
  const std::vector<float> cosines = factors(), sines = factors();
  if (draw.maybe()) problem.bias = bias.data();
  if (draw.maybe()) problem.distances = distances.data();
  if (draw.maybe()) {
    problem.rotated = problem.tokens;
    problem.cosines = cosines.data();
    problem.sines = sines.data();
  }
  std::vector<Value> found(count);
  problem.qkv = qkv.data();
  problem.out = found.data();
  attention::attend(problem, 1);
  for (const Value value : found) {
    const float wide = widened(value);
    out->write(reinterpret_cast<const char*>(&wide), sizeof wide);
  }
}

void write_attention(unsigned first, unsigned end, const std::string& beginning) {
  std::ofstream floats(beginning + ".float32", std::ios::binary), halves(beginning + ".bfloat16", std::ios::binary);
  for (unsigned number = first; number < end; ++number) {
    const Draw draw(number);
    if (attention::supports<float>()) attend<float>(draw, &floats);
    if (attention::supports<attention::Bfloat16>()) attend<attention::Bfloat16>(draw, &halves);
  }
  if (!floats.flush() || !halves.flush()) throw std::runtime_error("the results of attention cannot be written");
}

}  // namespace

int main(int count, char** words) {
  if (count != 3 && count != 4) {
    std::cerr << "usage: compare_kernels FIRST END [BEGINNING]\n";
    return 2;
  }
  const auto first = static_cast<unsigned>(std::atol(words[1])), end = static_cast<unsigned>(std::atol(words[2]));
  try {
    if (count == 4) {
      write_attention(first, end, words[3]);
    } else {
      compare_all(first, end);
    }
  } catch (const std::exception& error) {
    std::cerr << "compare_kernels: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
