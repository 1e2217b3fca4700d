#include "decoders.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace pipeedge::yaml {
namespace {

// As the runtime's: positions of a page, and the limits of a chunk.
constexpr double kPage = 32;
constexpr double kMostChunk = 256;
constexpr double kLeastChunk = 64;
constexpr double kChunkStep = 8;

double pages(double positions) { return std::ceil(positions / kPage); }

double rows_s(const StepCosts& steps, std::size_t layer, double rows) {
  double line = steps.start_s[layer] + rows * steps.row_s[layer];
  if (!steps.many_row_s.empty()) line = std::min(line, steps.many_start_s[layer] + rows * steps.many_row_s[layer]);
  return std::max(steps.fixed_s[layer], line);
}

double layers_s(const StepCosts& steps, double rows) {
  double sum = 0;
  for (std::size_t layer = 0; layer < steps.fixed_s.size(); ++layer) sum += rows_s(steps, layer, rows);
  return sum;
}

double ends_s(const StepCosts::Ends& ends, double rows) {
  return std::max(ends.fixed_s, ends.start_s + rows * ends.row_s);
}

}  // namespace

Texts Texts::complete(double longest) const {
  Texts whole = *this;
  if (whole.context == 0) whole.context = longest;
  if (whole.prompt == 0) {
    whole.prompt =
        whole.answer > 0 ? std::max(1.0, whole.context - whole.answer) : std::max(1.0, std::floor(whole.context / 4));
  }
  if (whole.answer == 0) whole.answer = std::max(1.0, whole.context - whole.prompt);
  return whole;
}

std::vector<double> Texts::group_counts(double hosts) const {
  if (groups > 0) return {groups};
  std::vector<double> counts;
  for (double count = 1; count <= std::min(streams, hosts + 1); ++count) counts.push_back(count);
  return counts;
}

double chunk_rows(const StepCosts& steps, double prompt, int stages) {
  if (stages < 2) return std::min(kMostChunk, prompt);
  const double most = std::max(1.0, std::floor(prompt / kLeastChunk));
  double best = prompt, soonest_s = kInfinity;
  for (double rows = kLeastChunk; rows <= kMostChunk; rows += kChunkStep) {
    const double chunks = std::min(std::ceil(prompt / rows), most);
    const double ends_s = (chunks + stages - 1) * layers_s(steps, prompt / chunks);
    if (ends_s < soonest_s) {
      soonest_s = ends_s;
      best = prompt / chunks;
    }
  }
  return best;
}

double most_rows(const Texts& texts) { return texts.streams + std::min(kMostChunk, texts.context); }

std::vector<double> state_bytes(const StepCosts& steps, const ModelSpec& model, const Texts& texts) {
  std::vector<double> bytes;
  for (std::size_t layer = 0; layer < steps.cache_bytes.size(); ++layer) {
    const double window = model.windows.empty() ? 0 : model.windows[layer];
    // A row in the first place of a page reaches window - 1 positions back.
    const double kept = window > 0 ? std::min(pages(texts.context), 1 + pages(window - 1)) : pages(texts.context);
    bytes.push_back(texts.streams * kept * kPage * steps.cache_bytes[layer]);
  }
  return bytes;
}

void set_step_costs(const StepCosts& steps, const ModelSpec& model, const StepRows& rows, DeviceType& type) {
  for (std::size_t layer = 0; layer < type.time_s.size(); ++layer) {
    const double window = model.windows.empty() ? 0 : model.windows[layer];
    const double attended = window > 0 ? std::min(rows.positions + 1, window) : rows.positions + 1;
    const double position_s = rows.chunk ? steps.chunk_position_s[layer] : steps.position_s[layer];
    type.time_s[layer] = rows_s(steps, layer, rows.rows) + rows.rows * attended * position_s;
  }
  const double texts = rows.chunk ? 1 : rows.rows;
  type.feed_s = steps.ends.feed_s + texts * steps.ends.feed_row_s;
  type.collect_s = rows.chunk ? 0 : ends_s(steps.ends, rows.rows);
}

double first_head_s(const StepCosts& steps) { return ends_s(steps.ends, 1); }

}  // namespace pipeedge::yaml
