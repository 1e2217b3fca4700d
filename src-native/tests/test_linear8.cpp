// Tests of the 8-bit layers alone, for builds that Python tests do not cover: AddressSanitizer and UBSan. Memory has
// exactly the right size. Python tests compare the results with double precision.
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "../linear8/linear8.hpp"

namespace {

using namespace pipeedge::linear8;

int failures = 0;

void check(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::cerr << "FAILED: " << what << '\n';
}

std::vector<Half> random_halves(std::size_t count, std::mt19937* random) {
  std::vector<Half> halves(count);
  // Signs and exponents near 0.
  for (Half& half : halves) half = static_cast<Half>(((*random)() & 0x80ff) | 0x3f00);
  return halves;
}

void test_layers(std::size_t rows, std::size_t inputs, std::size_t outputs, std::size_t threads) {
  std::mt19937 random(7);
  const std::vector<Half> x = random_halves(rows * inputs, &random);
  const std::vector<Half> residual = random_halves(rows * outputs, &random);
  const std::vector<Half> bias = random_halves(outputs, &random);
  const std::vector<Half> weight = random_halves(inputs, &random), shift = random_halves(inputs, &random);
  const std::vector<float> scales(outputs, 0.001F);
  std::vector<std::int8_t> weights(outputs * inputs);
  for (std::int8_t& code : weights) code = static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127);
  const Norm norm = {weight.data(), shift.data(), 1e-6F};
  for (const Activation activation : {Activation::kNone, Activation::kGelu, Activation::kGeluTanh}) {
    std::vector<std::uint8_t> codes(rows * inputs);
    std::vector<float> row_scales(rows);
    quantise(*variants().back(), x.data(), rows, inputs, norm, codes.data(), row_scales.data(), threads);
    std::vector<std::int32_t> sums(rows * outputs);
    for (std::size_t m = 0; m < rows; ++m) {
      for (std::size_t n = 0; n < outputs; ++n) {
        for (std::size_t k = 0; k < inputs; ++k) {
          sums[m * outputs + n] += (codes[m * inputs + k] - kZero) * weights[n * inputs + k];
        }
      }
    }
    std::vector<Half> wanted(rows * outputs);
    const Finish after = {scales.data(), bias.data(), activation, residual.data(), wanted.data(), outputs};
    finish(*variants().back(), after, sums.data(), row_scales.data(), rows, threads);
    for (const Variant* variant : variants()) {
      if (variant->tile_rows == 0) continue;
      std::vector<std::int8_t> packed(packed_bytes(*variant, outputs, inputs));
      pack(*variant, weights.data(), outputs, inputs, packed.data());
      std::vector<Half> found(rows * outputs);
      Finish same = after;
      same.out = found.data();
      apply(*variant, x.data(), rows, inputs, norm, packed.data(), same, threads);
      check(found == wanted, std::string(variant->name) + " computes " + std::to_string(rows) + "x" +
                                 std::to_string(inputs) + "x" + std::to_string(outputs));
    }
  }
}

}  // namespace

int main() {
  test_layers(1, 1, 1, 1);
  for (std::size_t rows = 1; rows <= 15; ++rows) test_layers(rows, 7 * rows, 31 + rows, 1);
  test_layers(3, 5, 7, 1);
  test_layers(17, 33, 65, 2);
  test_layers(113, 64, 32, 1);
  test_layers(160, 500, 700, 3);
  std::cout << (failures == 0 ? "all passed" : std::to_string(failures) + " failed") << '\n';
  return failures == 0 ? 0 : 1;
}
