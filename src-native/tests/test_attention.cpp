// Tests of attention alone, for builds that Python tests do not cover: AddressSanitizer and UBSan. Memory has exactly
// the right size. With equal keys every result is the mean of the values that its query reaches.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "../attention/attention.hpp"

namespace {

using namespace pipeedge::attention;

int failures = 0;

void check(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::cerr << "FAILED: " << what << '\n';
}

float value_of(float stored) { return stored; }

float value_of(std::uint16_t stored) {
  const std::uint32_t bits = static_cast<std::uint32_t>(stored) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void put(float value, float* to) { *to = value; }

void put(float value, std::uint16_t* to) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  *to = static_cast<std::uint16_t>(bits >> 16);
}

/// Mean of the numbers of the tokens that a token reaches.
float mean_place(std::size_t token, std::size_t tokens, std::size_t reach) {
  const std::size_t low = token < reach ? 0 : token - reach, high = std::min(tokens - 1, token + reach);
  return static_cast<float>(low + high) / 2;
}

/// Biases by distance, and rotations, are alike for all tokens, so that they do not change the means.
template <typename T>
void test_means(std::size_t items, std::size_t tokens, std::size_t heads, std::size_t size,
                std::size_t reach = kEverywhere, std::size_t rotated = 0) {
  const std::size_t width = heads * size;
  std::vector<T> qkv(items * tokens * 3 * width), out(items * tokens * width);
  for (std::size_t row = 0; row < items * tokens; ++row) {
    for (std::size_t i = 0; i < width; ++i) {
      put(static_cast<float>(row % 7) - 3, &qkv[row * 3 * width + i]);
      put(0.5F, &qkv[row * 3 * width + width + i]);
      put(static_cast<float>(i % 5 + row % tokens), &qkv[row * 3 * width + 2 * width + i]);
    }
  }
  const std::vector<float> bias(items * tokens, -1.5F);
  Problem<T> problem;
  problem.qkv = qkv.data();
  problem.bias = bias.data();
  problem.out = out.data();
  problem.items = items;
  problem.tokens = tokens;
  problem.heads = heads;
  problem.head_size = size;
  const std::vector<float> distances(heads * (2 * tokens - 1), 0.75F);
  const std::vector<float> cosines(rotated * size / 2, 0.6F), sines(rotated * size / 2, 0.8F);
  if (rotated != 0) {
    problem.distances = distances.data();
    problem.cosines = cosines.data();
    problem.sines = sines.data();
    problem.rotated = rotated;
  }
  problem.reach = reach;
  attend(problem, 3);
  bool close = true;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const float place = mean_place(i / width % tokens, tokens, std::min(reach, tokens));
    const float mean = static_cast<float>(i % width % 5) + place;
    close = close && std::abs(value_of(out[i]) - mean) <= 0.01F * mean + 1e-4F;
  }
  check(close, std::to_string(tokens) + " tokens, " + std::to_string(rotated) + " rotated, heads of " +
                   std::to_string(size) + ", reach " + std::to_string(reach));
}

template <typename T>
void test_sizes() {
  if (!supports<T>()) return;
  for (const std::size_t tokens : {1, 2, 11, 12, 13, 16, 31, 33, 200}) {
    for (const std::size_t size : {16, 48, 64}) {
      test_means<T>(2, tokens, 3, size);
      test_means<T>(2, tokens, 3, size, kEverywhere, tokens);
      for (const std::size_t reach : {0, 1, 15, 40}) test_means<T>(2, tokens, 3, size, reach, tokens);
    }
  }
}

}  // namespace

int main() {
  test_sizes<float>();
  test_sizes<Bfloat16>();
  std::cout << (failures == 0 ? "all passed" : std::to_string(failures) + " failed") << '\n';
  return failures == 0 ? 0 : 1;
}
