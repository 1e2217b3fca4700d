#include "codings.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace pipeedge::decoder {

namespace {

constexpr unsigned kLow = 0x0f;

float of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Reads a float16.
float half_at(const std::uint8_t* from) {
  std::uint16_t half;
  std::memcpy(&half, from, sizeof half);
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fU, fraction = half & 0x3ffU;
  if (exponent == 0) return std::copysign(std::ldexp(static_cast<float>(fraction), -24), of_bits(sign | 0x3f800000U));
  if (exponent == 0x1f) return of_bits(sign | 0x7f800000U | fraction << 13);
  return of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

float bfloat16_at(const std::uint8_t* from) {
  std::uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return of_bits(static_cast<std::uint32_t>(half) << 16);
}

std::int8_t limited(int code) { return static_cast<std::int8_t>(std::max(-127, std::min(127, code))); }

/// Writes codes of 4 bits, of which those of the second half of a group are in the upper bits.
void halves_of(const std::uint8_t* from, std::uint8_t* codes) {
  for (std::size_t i = 0; i < kGroup / 2; ++i) {
    codes[i] = from[i] & kLow;
    codes[i + kGroup / 2] = static_cast<std::uint8_t>(from[i] >> 4);
  }
}

/// Writes `scale` times codes minus `offset`.
void scaled(const std::uint8_t* codes, float scale, float offset, float* values) {
  for (std::size_t i = 0; i < kGroup; ++i) values[i] = scale * static_cast<float>(codes[i]) - offset;
}

/// Takes over a group whose weights are `step` times code minus `offset`, which must be a distance that a zero can have.
bool takes(float step, float offset, NibbleGroup& out) {
  out.scale = step / kParts;
  if (step == 0 && offset == 0) {
    out.zero = 0;
    return true;
  }
  const float zero = kParts * offset / step + 0.5F;
  if (!(step > 0 && offset >= 0 && zero < kMostZero + 1)) return false;
  out.zero = static_cast<int>(zero);
  return true;
}

// 8 bits, and 4 and 5 bits with one scale -------------------------------------------------------------------------

constexpr std::size_t kBytesQ80 = 34, kBytesQ40 = 18, kBytesQ41 = 20, kBytesQ50 = 22, kBytesQ51 = 24;

void bytes_q8_0(const std::uint8_t* row, std::size_t group, ByteGroup& out) {
  const std::uint8_t* from = row + group * kBytesQ80;
  out.scale = half_at(from);
  for (std::size_t i = 0; i < kGroup; ++i) out.codes[i] = limited(static_cast<std::int8_t>(from[2 + i]));
}

void decode_q8_0(const std::uint8_t* from, float* values) {
  const float scale = half_at(from);
  for (std::size_t i = 0; i < kGroup; ++i)
    values[i] = scale * static_cast<float>(static_cast<std::int8_t>(from[2 + i]));
}

bool nibbles_q4_0(const std::uint8_t* row, std::size_t group, NibbleGroup& out) {
  const std::uint8_t* from = row + group * kBytesQ40;
  const float step = half_at(from);
  halves_of(from + 2, out.codes);
  if (step < 0) {  // the same weights with the codes counted from the other end
    for (std::uint8_t& code : out.codes) code = static_cast<std::uint8_t>(kMostNibble - code);
    return takes(-step, -step * (kMostNibble - 8), out);
  }
  return takes(step, step * 8, out);
}

void decode_q4_0(const std::uint8_t* from, float* values) {
  std::uint8_t codes[kGroup];
  halves_of(from + 2, codes);
  const float scale = half_at(from);
  for (std::size_t i = 0; i < kGroup; ++i) values[i] = scale * static_cast<float>(codes[i] - 8);
}

bool nibbles_q4_1(const std::uint8_t* row, std::size_t group, NibbleGroup& out) {
  const std::uint8_t* from = row + group * kBytesQ41;
  halves_of(from + 4, out.codes);
  return takes(half_at(from), -half_at(from + 2), out);
}

void decode_q4_1(const std::uint8_t* from, float* values) {
  std::uint8_t codes[kGroup];
  halves_of(from + 4, codes);
  scaled(codes, half_at(from), -half_at(from + 2), values);
}

/// Writes codes of 5 bits, whose fifth bits are together.
void fives_of(const std::uint8_t* fifths, const std::uint8_t* from, std::uint8_t* codes) {
  constexpr std::uint8_t kBits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  halves_of(from, codes);
  for (std::size_t i = 0; i < kGroup; ++i) {
    codes[i] = static_cast<std::uint8_t>(codes[i] | ((fifths[i / 8] & kBits[i % 8]) != 0 ? 16 : 0));
  }
}

void bytes_q5_0(const std::uint8_t* row, std::size_t group, ByteGroup& out) {
  const std::uint8_t* from = row + group * kBytesQ50;
  std::uint8_t codes[kGroup];
  fives_of(from + 2, from + 6, codes);
  out.scale = half_at(from);
  for (std::size_t i = 0; i < kGroup; ++i) out.codes[i] = static_cast<std::int8_t>(codes[i] - 16);
}

void decode_q5_0(const std::uint8_t* from, float* values) {
  std::uint8_t codes[kGroup];
  fives_of(from + 2, from + 6, codes);
  const float scale = half_at(from);
  for (std::size_t i = 0; i < kGroup; ++i) values[i] = scale * static_cast<float>(codes[i] - 16);
}

void decode_q5_1(const std::uint8_t* from, float* values) {
  std::uint8_t codes[kGroup];
  fives_of(from + 4, from + 8, codes);
  scaled(codes, half_at(from), -half_at(from + 2), values);
}

// Units of 256 with scales of scales -------------------------------------------------------------------------------

constexpr std::size_t kBytesQ4K = 144, kBytesQ5K = 176, kBytesQ6K = 210;
constexpr std::size_t kScales = 4, kAfterScales = 16;  // places of the scales, and of what follows, in Q4_K and Q5_K

/// The 6 bits of a group's scale and of its offset.
struct Sixes {
  int scale, offset;
};

Sixes sixes_of(const std::uint8_t* scales, std::size_t group) {
  constexpr unsigned kSix = 63;
  const std::size_t g = group;
  if (g < 4) return {static_cast<int>(scales[g] & kSix), static_cast<int>(scales[g + 4] & kSix)};
  return {static_cast<int>((scales[g + 4] & kLow) | (scales[g - 4] >> 6) << 4),
          static_cast<int>((scales[g + 4] >> 4) | (scales[g] >> 6) << 4)};
}

/// Step and offset of a group of a unit of Q4_K or Q5_K.
struct Line {
  float step, offset;
};

Line line_of(const std::uint8_t* unit, std::size_t group) {
  const Sixes sixes = sixes_of(unit + kScales, group);
  return {half_at(unit) * static_cast<float>(sixes.scale), half_at(unit + 2) * static_cast<float>(sixes.offset)};
}

void codes_q4_k(const std::uint8_t* unit, std::size_t group, std::uint8_t* codes) {
  const std::uint8_t* from = unit + kAfterScales + group / 2 * kGroup;
  for (std::size_t i = 0; i < kGroup; ++i) {
    codes[i] = static_cast<std::uint8_t>(group % 2 == 0 ? from[i] & kLow : from[i] >> 4);
  }
}

bool nibbles_q4_k(const std::uint8_t* row, std::size_t group, NibbleGroup& out) {
  constexpr std::size_t kGroups = kSuper / kGroup;
  const std::uint8_t* unit = row + group / kGroups * kBytesQ4K;
  codes_q4_k(unit, group % kGroups, out.codes);
  const Line line = line_of(unit, group % kGroups);
  return takes(line.step, line.offset, out);
}

void decode_q4_k(const std::uint8_t* from, float* values) {
  std::uint8_t codes[kGroup];
  for (std::size_t g = 0; g < kSuper / kGroup; ++g) {
    codes_q4_k(from, g, codes);
    const Line line = line_of(from, g);
    scaled(codes, line.step, line.offset, values + g * kGroup);
  }
}

void decode_q5_k(const std::uint8_t* from, float* values) {
  const std::uint8_t *fifths = from + kAfterScales, *fours = fifths + kGroup;
  std::uint8_t codes[kGroup];
  for (std::size_t g = 0; g < kSuper / kGroup; ++g) {
    for (std::size_t i = 0; i < kGroup; ++i) {
      const unsigned both = fours[g / 2 * kGroup + i];
      codes[i] = static_cast<std::uint8_t>((g % 2 == 0 ? both & kLow : both >> 4) | ((fifths[i] >> g) & 1U) << 4);
    }
    const Line line = line_of(from, g);
    scaled(codes, line.step, line.offset, values + g * kGroup);
  }
}

void decode_q6_k(const std::uint8_t* from, float* values) {
  constexpr std::size_t kHalf = 128, kEach = 16;  // weights of a half of a unit, and of a scale
  const float all = half_at(from + kBytesQ6K - 2);
  for (std::size_t half = 0; half < kSuper / kHalf; ++half) {
    const std::uint8_t *fours = from + half * kHalf / 2, *twos = from + kSuper / 2 + half * kGroup;
    const std::uint8_t* scales = from + kSuper / 2 + kSuper / 4 + half * kHalf / kEach;
    std::uint8_t codes[kHalf];
    for (std::size_t i = 0; i < kGroup; ++i) {
      const unsigned first = fours[i], second = fours[kGroup + i], high = twos[i];
      codes[i] = static_cast<std::uint8_t>((first & kLow) | (high & 3) << 4);
      codes[kGroup + i] = static_cast<std::uint8_t>((second & kLow) | (high >> 2 & 3) << 4);
      codes[2 * kGroup + i] = static_cast<std::uint8_t>(first >> 4 | (high >> 4 & 3) << 4);
      codes[3 * kGroup + i] = static_cast<std::uint8_t>(second >> 4 | (high >> 6) << 4);
    }
    for (std::size_t each = 0; each < kHalf / kEach; ++each) {
      const float scale = all * static_cast<float>(static_cast<std::int8_t>(scales[each]));
      float* to = values + half * kHalf + each * kEach;
      for (std::size_t i = 0; i < kEach; ++i) to[i] = scale * static_cast<float>(codes[each * kEach + i] - 32);
    }
  }
}

// Our own ----------------------------------------------------------------------------------------------------------

void bytes_own(const std::uint8_t* row, std::size_t group, ByteGroup& out) {
  const std::uint8_t* from = row + group * kByteGroupBytes;
  out.scale = bfloat16_at(from);
  for (std::size_t i = 0; i < kGroup; ++i) out.codes[i] = limited(static_cast<std::int8_t>(from[2 + i]));
}

void decode_bytes(const std::uint8_t* from, float* values) {
  ByteGroup group;
  bytes_own(from, 0, group);
  for (std::size_t i = 0; i < kGroup; ++i) values[i] = static_cast<float>(group.codes[i]) * group.scale;
}

bool nibbles_own(const std::uint8_t* row, std::size_t group, NibbleGroup& out) {
  const std::uint8_t* from = row + group * kNibbleGroupBytes;
  out.scale = bfloat16_at(from);
  out.zero = std::min<int>(from[2], kMostZero);
  halves_of(from + 3, out.codes);
  return true;
}

void decode_nibbles(const std::uint8_t* from, float* values) {
  NibbleGroup group;
  nibbles_own(from, 0, group);
  for (std::size_t i = 0; i < kGroup; ++i) {
    values[i] = static_cast<float>(kParts * group.codes[i] - group.zero) * group.scale;
  }
}

}  // namespace

const std::vector<Coding>& codings() {
  static const std::vector<Coding> all = {
      {"Q4_0", kGroup, kBytesQ40, decode_q4_0, nullptr, nibbles_q4_0},
      {"Q4_1", kGroup, kBytesQ41, decode_q4_1, nullptr, nibbles_q4_1},
      {"Q5_0", kGroup, kBytesQ50, decode_q5_0, bytes_q5_0, nullptr},
      {"Q5_1", kGroup, kBytesQ51, decode_q5_1, nullptr, nullptr},
      {"Q8_0", kGroup, kBytesQ80, decode_q8_0, bytes_q8_0, nullptr},
      {"Q4_K", kSuper, kBytesQ4K, decode_q4_k, nullptr, nibbles_q4_k},
      {"Q5_K", kSuper, kBytesQ5K, decode_q5_k, nullptr, nullptr},
      {"Q6_K", kSuper, kBytesQ6K, decode_q6_k, nullptr, nullptr},
      {"int8", kGroup, kByteGroupBytes, decode_bytes, bytes_own, nullptr},
      {"int4", kGroup, kNibbleGroupBytes, decode_nibbles, nullptr, nibbles_own},
  };
  return all;
}

const Coding* find_coding(const std::string& name) {
  for (const Coding& coding : codings()) {
    if (name == coding.name) return &coding;
  }
  return nullptr;
}

void store(Half scale, const std::int8_t* codes, std::uint8_t* out) {
  std::memcpy(out, &scale, sizeof scale);
  std::memcpy(out + sizeof scale, codes, kGroup);
}

void store(Half scale, std::uint8_t zero, const std::uint8_t* codes, std::uint8_t* out) {
  std::memcpy(out, &scale, sizeof scale);
  out[sizeof scale] = zero;
  for (std::size_t i = 0; i < kGroup / 2; ++i) {
    out[sizeof scale + 1 + i] = static_cast<std::uint8_t>(codes[i] | codes[i + kGroup / 2] << 4);
  }
}

}  // namespace pipeedge::decoder
