#include "stage.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <utility>

namespace pipeedge::decoder {

namespace {

using parallel::Team;

/// Most rows by heads that attend together, unless the heads that share keys are more.
constexpr std::size_t kTogether = 32;

double elapsed_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Returns the processor time of this thread, which does not grow while a quota makes it pause.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::size_t parts_of(std::size_t whole, std::size_t part) { return (whole + part - 1) / part; }

/// Copies rows of the stream's type to float32.
void read_rows(Type stream, const void* from, std::size_t count, float* to) {
  if (stream == Type::kFloat32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  const auto* halves = static_cast<const Half*>(from);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(halves[i]) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

void write_rows(const Variant& variant, Type stream, const float* from, std::size_t count, void* to) {
  if (stream == Type::kFloat32) {
    std::memcpy(to, from, count * sizeof(float));
  } else {
    variant.narrow(from, count, static_cast<Half*>(to));
  }
}

void add(float* values, const float* more, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) values[i] += more[i];
}

/// Adds the biases of some columns, if there are any.
void add_bias(float* values, const std::vector<float>& bias, std::size_t first, std::size_t count) {
  if (!bias.empty()) add(values, bias.data() + first, count);
}

/// A norm from its weights and, of a LayerNorm, biases behind them.
Norm norm_of(const std::vector<float>& values, std::size_t width, bool centred, float eps) {
  Norm norm;
  if (values.empty()) return norm;
  norm.weight = values.data();
  norm.bias = values.size() > width ? values.data() + width : nullptr;
  norm.centred = centred;
  norm.eps = eps;
  return norm;
}

/// Computes a product, and calls finish(row, first column, columns, sums, sums of the other matrix) for each row of
/// each piece. Where `in_place` has room for all rows and outputs, it takes the sums of whole panels.
template <typename Finish>
void multiply(Team& team, const Variant& variant, const Operand& operand, const Matrix& matrix, const Matrix* other,
              std::vector<float>& sums, std::vector<float>& more, const Finish& finish, float* in_place = nullptr) {
  const std::size_t rows = operand.rows(), threads = team.size();
  team.share(matrix.pieces(rows, threads), [&](std::size_t number) {
    const Piece piece = matrix.piece(rows, threads, number);
    const std::size_t stride = piece.panels * kColumns, first = piece.panel * kColumns;
    const std::size_t columns = std::min(stride, matrix.outputs() - first);
    float* values = nullptr;
    std::size_t apart = stride;
    if (in_place != nullptr && columns == stride) {
      values = in_place + piece.row * matrix.outputs() + first;
      apart = matrix.outputs();
    } else {
      sums.resize(std::max(sums.size(), piece.rows * stride));
      values = sums.data();
    }
    matrix.multiply(variant, operand, piece.row, piece.row + piece.rows, piece.panel, piece.panel + piece.panels,
                    values, apart);
    if (other != nullptr) {
      more.resize(std::max(more.size(), piece.rows * stride));
      other->multiply(variant, operand, piece.row, piece.row + piece.rows, piece.panel, piece.panel + piece.panels,
                      more.data(), stride);
    }
    for (std::size_t r = 0; r < piece.rows; ++r) {
      finish(piece.row + r, first, columns, values + r * apart, more.data() + (other ? r * stride : 0));
    }
  });
}

}  // namespace

/// What all threads know of a step.
struct Stage::Work {
  Work(const Variant& of, const std::vector<Sequence>& those) : variant(of), sequences(those) {
    for (std::size_t s = 0; s < those.size(); ++s) {
      for (std::size_t r = 0; r < those[s].rows; ++r) {
        sequence_of.push_back(s);
        position_of.push_back(those[s].position + r);
      }
    }
    rows = position_of.size();
    all.resize(1);
    std::size_t row = 0;
    for (std::size_t s = 0; s < those.size(); ++s) {
      const Sequence& one = those[s];
      if (one.rows > 0) all[0].push_back({s, row, one.position, one.rows});
      std::size_t done = 0;
      for (std::size_t page = 0; done < one.rows; ++page) {
        const std::size_t position = one.position + done;
        const std::size_t count = std::min(one.rows - done, kPage - position % kPage);
        if (by_page.size() <= page) by_page.emplace_back();
        by_page[page].push_back({s, row + done, position, count});
        done += count;
      }
      row += one.rows;
    }
  }

  const Variant& variant;
  const std::vector<Sequence>& sequences;
  Team team;
  std::size_t rows = 0;
  std::vector<std::size_t> sequence_of, position_of;
  /// Spans that are written and attend at once, in turn: all rows, or, if there is a window, those of a page of each
  /// sequence, since pages that the window has left may be written again.
  std::vector<std::vector<Span>> all, by_page;
};

Stage::Stage(Settings settings, std::vector<Block> blocks, std::size_t first, std::size_t end, std::size_t pages,
             std::size_t window_pages)
    : settings_(std::move(settings)), blocks_(std::move(blocks)), first_(first), end_(end), pages_(pages),
      window_pages_(window_pages) {
  const Settings& all = settings_;
  const std::size_t queries = all.heads * all.head_size, keys = all.kv_heads * all.head_size;
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    Block& block = blocks_[b];
    if (owns(b, 0)) {
      block.qkv = Matrix(all.weights, queries + 2 * keys, all.hidden);
      const std::size_t count = block.window == 0 ? pages : window_pages;
      block.cache = Memory(count * all.kv_heads * 2 * head_bytes());
    }
    if (owns(b, 1)) block.proj = Matrix(all.weights, all.hidden, queries);
    if (owns(b, 2)) {
      if (all.gated) block.gate = Matrix(all.weights, all.inner, all.hidden);
      block.up = Matrix(all.weights, all.inner, all.hidden);
    }
    if (owns(b, 3)) block.down = Matrix(all.weights, all.hidden, all.inner);
  }
}

bool Stage::owns(std::size_t block, std::size_t layer) const {
  const std::size_t number = block * kLayers + layer;
  return first_ <= number && number < end_;
}

std::size_t Stage::width_after(std::size_t layers) const {
  if (layers % kLayers == 1) return settings_.heads * settings_.head_size;
  return layers % kLayers == 3 ? settings_.inner : settings_.hidden;
}

std::size_t Stage::cache_bytes() const {
  std::size_t bytes = 0;
  for (const Block& block : blocks_) bytes += block.cache.bytes();
  return bytes;
}

std::size_t Stage::weight_bytes() const {
  std::size_t bytes = 0;
  for (const Block& block : blocks_) {
    for (const Matrix* matrix : {&block.qkv, &block.proj, &block.gate, &block.up, &block.down})
      bytes += matrix->bytes();
  }
  return bytes;
}

bool Stage::attends(bool windowed) const {
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    if (owns(b, 0) && (blocks_[b].window != 0) == windowed) return true;
  }
  return false;
}

std::size_t Stage::multiplications(const Work& work) const {
  std::size_t count = 0;
  for (const Block& block : blocks_) {
    for (const Matrix* matrix : {&block.qkv, &block.proj, &block.gate, &block.up, &block.down})
      count += work.rows * matrix->outputs() * matrix->inputs();
    if (block.cache.bytes() == 0) continue;
    for (const Sequence& one : work.sequences) {
      const std::size_t all = one.position + one.rows, keys = block.window == 0 ? all : std::min(all, block.window);
      count += 2 * one.rows * keys * settings_.heads * settings_.head_size;
    }
  }
  return count;
}

void Stage::adopt(std::size_t layer, const Stage& other, std::size_t others_layer) {
  Block& to = blocks_.at(layer / kLayers);
  const Block& from = other.blocks_.at(others_layer / kLayers);
  switch (layer % kLayers) {
    case 0:
      to.qkv = from.qkv;
      to.qkv_bias = from.qkv_bias;
      to.attention_norm = from.attention_norm;
      to.query_norm = from.query_norm;
      to.key_norm = from.key_norm;
      to.cache = from.cache;
      break;
    case 1:
      to.proj = from.proj;
      to.proj_bias = from.proj_bias;
      to.attention_end = from.attention_end;
      break;
    case 2:
      to.gate = from.gate;
      to.gate_bias = from.gate_bias;
      to.up = from.up;
      to.up_bias = from.up_bias;
      to.mlp_norm = from.mlp_norm;
      break;
    default:
      to.down = from.down;
      to.down_bias = from.down_bias;
      to.mlp_end = from.mlp_end;
  }
}

Block& Stage::block(std::size_t number) { return blocks_.at(number); }

void Stage::clear_cache() {
  for (const Block& block : blocks_) std::fill_n(block.cache.data(), block.cache.bytes(), '\0');
}

void Stage::find_angles(const Work& work) {
  std::size_t width = 0;
  for (const Rotation& rotation : settings_.rotations) width += rotation.frequencies.size();
  cosines_.resize(work.rows * width);
  sines_.resize(work.rows * width);
  std::size_t at = 0;
  for (const Rotation& rotation : settings_.rotations) {
    const std::size_t count = rotation.frequencies.size();
    std::vector<float> own = rotation.frequencies;
    for (std::size_t row = 0; row < work.rows; ++row) {
      const std::size_t position = work.position_of[row];
      if (rotation.dynamic_from != 0) {
        own = rotation.frequencies;
        if (position >= rotation.dynamic_from) {
          const double length = static_cast<double>(position + 1) / static_cast<double>(rotation.dynamic_from);
          const auto size = static_cast<double>(2 * count);
          const double base =
              rotation.base * std::pow(rotation.stretch * length - (rotation.stretch - 1), size / (size - 2));
          for (std::size_t i = 0; i < count; ++i) {
            own[i] = static_cast<float>(1 / std::pow(base, static_cast<double>(2 * i) / size));
          }
        }
      }
      for (std::size_t i = 0; i < count; ++i) {
        const auto angle = static_cast<double>(static_cast<float>(position) * own[i]);
        cosines_[at + row * count + i] = static_cast<float>(std::cos(angle)) * rotation.factor;
        sines_[at + row * count + i] = static_cast<float>(std::sin(angle)) * rotation.factor;
      }
    }
    at += work.rows * count;
  }
}

void Stage::prepare(Work& work, const std::vector<float>& norm, const std::vector<float>& x, std::size_t width) {
  const Norm before = norm_of(norm, width, settings_.norm_centred, settings_.eps);
  work.team.share(work.rows, [&](std::size_t row) {
    const float* from = x.data() + row * width;
    if (before.weight != nullptr) {
      float* normed = normed_.data() + row * width;
      work.variant.normalise(before, from, width, normed);
      from = normed;
    }
    operands_.at(width).set(work.variant, row, from);
  });
}

void Stage::rotate(const Work& work, const Block& block, std::size_t row) {
  const Settings& all = settings_;
  const std::size_t heads = all.heads + all.kv_heads, size = all.head_size;
  float* values = qkv_.data() + row * (heads + all.kv_heads) * size;
  float* keys = values + all.heads * size;
  if (all.head_norm == HeadNorm::kAllHeads) {
    work.variant.normalise(norm_of(block.query_norm, all.heads * size, false, all.eps), values, all.heads * size,
                           values);
    work.variant.normalise(norm_of(block.key_norm, all.kv_heads * size, false, all.eps), keys, all.kv_heads * size,
                           keys);
  } else if (all.head_norm == HeadNorm::kEachHead) {
    const Norm queries = norm_of(block.query_norm, size, false, all.eps);
    const Norm of_keys = norm_of(block.key_norm, size, false, all.eps);
    for (std::size_t h = 0; h < heads; ++h) {
      work.variant.normalise(h < all.heads ? queries : of_keys, values + h * size, size, values + h * size);
    }
  }
  if (block.rotation >= 0) {
    const auto number = static_cast<std::size_t>(block.rotation);
    std::size_t at = 0;
    for (std::size_t i = 0; i < number; ++i) at += work.rows * all.rotations[i].frequencies.size();
    const std::size_t count = all.rotations[number].frequencies.size();
    const float* cosines = cosines_.data() + at + row * count;
    const float* sines = sines_.data() + at + row * count;
    for (std::size_t h = 0; h < heads; ++h) {
      float* head = values + h * size;
      for (std::size_t i = 0; i < count; ++i) {
        const float x = head[i], y = head[count + i];
        head[i] = x * cosines[i] - y * sines[i];
        head[count + i] = y * cosines[i] + x * sines[i];
      }
    }
  }
  if (all.temper_from != 0) {
    const std::size_t times = work.position_of[row] / all.temper_from;
    const float growth = 1 + all.temper * std::log1p(static_cast<float>(times));
    for (std::size_t i = 0; i < all.heads * size; ++i) values[i] *= growth;
  }
}

char* Stage::keys_of(const Block& block, std::size_t page, std::size_t head) const {
  return block.cache.data() + (page * settings_.kv_heads + head) * 2 * head_bytes();
}

std::size_t Stage::page_of(const Work& work, const Block& block, std::size_t sequence, std::size_t page) const {
  const Sequence& one = work.sequences[sequence];
  return static_cast<std::size_t>((block.window == 0 ? one.pages : one.window_pages)[page]);
}

void Stage::write(const Work& work, Block& block, std::size_t row) const {
  const Settings& all = settings_;
  const std::size_t size = all.head_size, padded = padded_head(), position = work.position_of[row];
  const std::size_t place = position % kPage;
  const std::size_t page = page_of(work, block, work.sequence_of[row], position / kPage);
  const float* keys = qkv_.data() + (row * (all.heads + 2 * all.kv_heads) + all.heads) * size;
  const float* values = keys + all.kv_heads * size;
  for (std::size_t h = 0; h < all.kv_heads; ++h, keys += size, values += size) {
    char* to = keys_of(block, page, h);
    char* value_row = to + head_bytes() + place * padded * cache_value_bytes();
    if (all.stream == Type::kFloat32) {
      for (std::size_t i = 0; i < size; ++i) std::memcpy(to + (i * kPage + place) * kUnit, keys + i, sizeof(float));
      std::memcpy(value_row, values, size * sizeof(float));
    } else {
      constexpr std::size_t kSome = 64;
      Half halves[kSome];
      for (std::size_t first = 0; first < size; first += kSome) {
        const std::size_t count = std::min(kSome, size - first);
        work.variant.narrow(keys + first, count, halves);
        for (std::size_t i = 0; i < count; ++i) {
          const std::size_t e = first + i;
          std::memcpy(to + (e / 2 * kPage + place) * kUnit + e % 2 * sizeof(Half), halves + i, sizeof(Half));
        }
      }
      work.variant.narrow(values, size, reinterpret_cast<Half*>(value_row));
    }
  }
}

void Stage::attend(const Work& work, const Block& block, const Span& span, std::size_t first_head, std::size_t heads,
                   Scratch& scratch) {
  const Settings& all = settings_;
  const std::size_t size = all.head_size, padded = padded_head(), kv_head = first_head / (all.heads / all.kv_heads);
  const auto first_key = [&](std::size_t position) {
    return block.window == 0 || position < block.window ? 0 : position + 1 - block.window;
  };
  const std::size_t first_page = first_key(span.position) / kPage;
  const std::size_t end_page = (span.position + span.rows - 1) / kPage + 1;
  const std::size_t columns = (end_page - first_page) * kPage, rows = span.rows * heads;
  // Query r of the span by head h is row r * heads + h.
  scratch.queries.resize(all.stream, rows, size);
  for (std::size_t i = 0; i < rows; ++i) {
    const float* query =
        qkv_.data() + ((span.row + i / heads) * (all.heads + 2 * all.kv_heads) + first_head + i % heads) * size;
    scratch.queries.set(work.variant, i, query);
  }
  scratch.scores.resize(std::max(scratch.scores.size(), rows * columns));
  scratch.sums.resize(std::max(scratch.sums.size(), rows * padded));
  scratch.totals.resize(std::max(scratch.totals.size(), rows));
  std::fill_n(scratch.sums.begin(), rows * padded, 0.0F);
  const Product& product = work.variant.products[static_cast<int>(all.stream)];
  if (product.begin != nullptr) product.begin();
  for (std::size_t page = first_page; page < end_page; ++page) {
    const char* keys = keys_of(block, page_of(work, block, span.sequence, page), kv_head);
    for (std::size_t row = 0; row < rows; row += product.tile_rows) {
      Tile tile = scratch.queries.tile(row, 0);
      tile.panel = keys;
      tile.units = padded * cache_value_bytes() / kUnit;
      tile.sums = scratch.scores.data() + row * columns + (page - first_page) * kPage;
      tile.sum_stride = columns;
      product.multiply(tile, std::min(product.tile_rows, rows - row));
    }
  }
  if (product.end != nullptr) product.end();
  const std::size_t base = first_page * kPage;
  for (std::size_t i = 0; i < rows; ++i) {
    const std::size_t position = span.position + i / heads;
    Scores scores;
    scores.values = scratch.scores.data() + i * columns;
    scores.count = parts_of(position + 1 - base, kPage) * kPage;
    scores.begin = first_key(position) - base;
    scores.end = position + 1 - base;
    scores.scale = all.scale;
    scores.cap = all.score_cap;
    scratch.totals[i] = work.variant.weigh(scores);
  }
  // Rows that attend to the same places of a page are taken together.
  for (std::size_t page = first_page; page < end_page; ++page) {
    const std::size_t start = page * kPage;
    const auto begin_of = [&](std::size_t r) {
      const std::size_t key = first_key(span.position + r);
      return key < start ? 0 : std::min(key - start, kPage);
    };
    const auto end_of = [&](std::size_t r) {
      const std::size_t end = span.position + r + 1;
      return end < start ? 0 : std::min(end - start, kPage);
    };
    Mixture mixture;
    mixture.weight_stride = columns;
    mixture.values = keys_of(block, page_of(work, block, span.sequence, page), kv_head) + head_bytes();
    mixture.width = padded;
    mixture.type = all.stream;
    mixture.sum_stride = padded;
    for (std::size_t r = 0; r < span.rows;) {
      std::size_t behind = r + 1;
      while (behind < span.rows && begin_of(behind) == begin_of(r) && end_of(behind) == end_of(r)) ++behind;
      mixture.begin = begin_of(r);
      mixture.end = end_of(r);
      mixture.weights = scratch.scores.data() + r * heads * columns + start - base;
      mixture.sums = scratch.sums.data() + r * heads * padded;
      if (mixture.begin < mixture.end) work.variant.mix(mixture, (behind - r) * heads);
      r = behind;
    }
  }
  for (std::size_t i = 0; i < rows; ++i) {
    const float inverse = 1 / scratch.totals[i];
    float* to = context_.data() + ((span.row + i / heads) * all.heads + first_head + i % heads) * size;
    for (std::size_t e = 0; e < size; ++e) to[e] = scratch.sums[i * padded + e] * inverse;
    if (all.stream != Type::kFloat32) work.variant.round(to, size);
  }
}

void Stage::attention(Work& work, std::size_t thread, Block& block) {
  const Settings& all = settings_;
  Scratch& scratch = scratch_[thread];
  prepare(work, block.attention_norm, hidden_, all.hidden);
  const std::size_t width = (all.heads + 2 * all.kv_heads) * all.head_size;
  multiply(work.team, work.variant, operands_.at(all.hidden), block.qkv, nullptr, scratch.sums, scratch.more,
           [&](std::size_t row, std::size_t first, std::size_t count, float* sums, float*) {
             add_bias(sums, block.qkv_bias, first, count);
             std::memcpy(qkv_.data() + row * width + first, sums, count * sizeof(float));
           });
  const std::vector<std::vector<Span>>& turns = block.window == 0 ? work.all : work.by_page;
  work.team.share(work.rows, [&](std::size_t row) {
    rotate(work, block, row);
    if (block.window == 0) write(work, block, row);
  });
  const std::size_t group = all.heads / all.kv_heads;
  const std::size_t rows_at_once = std::max<std::size_t>(1, kTogether / group);
  for (const std::vector<Span>& spans : turns) {
    if (block.window != 0) {
      work.team.share(spans.size(), [&](std::size_t s) {
        for (std::size_t r = 0; r < spans[s].rows; ++r) write(work, block, spans[s].row + r);
      });
    }
    std::size_t tiles = 0;
    for (const Span& span : spans) tiles += parts_of(span.rows, rows_at_once);
    // The heads that share keys are divided only where threads would have nothing to do.
    const std::size_t divided = std::min(group, parts_of(work.team.size(), tiles * all.kv_heads));
    work.team.share(tiles * all.kv_heads * divided, [&](std::size_t item) {
      const std::size_t part = item % divided, head = item / divided % all.kv_heads;
      std::size_t tile = item / divided / all.kv_heads, s = 0;
      while (tile >= parts_of(spans[s].rows, rows_at_once)) tile -= parts_of(spans[s++].rows, rows_at_once);
      Span some = spans[s];
      some.row += tile * rows_at_once;
      some.position += tile * rows_at_once;
      some.rows = std::min(rows_at_once, spans[s].rows - tile * rows_at_once);
      const std::size_t first = group * part / divided, end = group * (part + 1) / divided;
      attend(work, block, some, head * group + first, end - first, scratch);
    });
  }
}

void Stage::project(Work& work, std::size_t thread, const Matrix& matrix, const std::vector<float>& bias,
                    const std::vector<float>& end_norm, const std::vector<float>& x, std::size_t width) {
  const Settings& all = settings_;
  Scratch& scratch = scratch_[thread];
  const auto add_to_hidden = [&](std::size_t row, std::size_t first, std::size_t count, const float* values) {
    float* to = hidden_.data() + row * all.hidden + first;
    for (std::size_t i = 0; i < count; ++i) to[i] += values[i] * all.residual_scale;
    if (all.stream != Type::kFloat32) work.variant.round(to, count);
  };
  prepare(work, {}, x, width);
  multiply(work.team, work.variant, operands_.at(width), matrix, nullptr, scratch.sums, scratch.more,
           [&](std::size_t row, std::size_t first, std::size_t count, float* sums, float*) {
             add_bias(sums, bias, first, count);
             if (end_norm.empty()) {
               add_to_hidden(row, first, count, sums);
             } else {
               std::memcpy(raw_.data() + row * all.hidden + first, sums, count * sizeof(float));
             }
           });
  if (end_norm.empty()) return;
  const Norm norm = norm_of(end_norm, all.hidden, all.norm_centred, all.eps);
  work.team.share(work.rows, [&](std::size_t row) {
    float* values = raw_.data() + row * all.hidden;
    work.variant.normalise(norm, values, all.hidden, values);
    add_to_hidden(row, 0, all.hidden, values);
  });
}

void Stage::mlp_in(Work& work, std::size_t thread, const Block& block) {
  const Settings& all = settings_;
  Scratch& scratch = scratch_[thread];
  prepare(work, block.mlp_norm, hidden_, all.hidden);
  const Matrix& first_matrix = all.gated ? block.gate : block.up;
  multiply(work.team, work.variant, operands_.at(all.hidden), first_matrix, all.gated ? &block.up : nullptr,
           scratch.sums, scratch.more,
           [&](std::size_t row, std::size_t first, std::size_t count, float* sums, float* more) {
             if (all.gated) {
               add_bias(sums, block.gate_bias, first, count);
               add_bias(more, block.up_bias, first, count);
               work.variant.activate(all.activation, sums, more, count);
             } else {
               add_bias(sums, block.up_bias, first, count);
               work.variant.activate(all.activation, sums, nullptr, count);
             }
             if (all.stream != Type::kFloat32) work.variant.round(sums, count);
             std::memcpy(inner_.data() + row * all.inner + first, sums, count * sizeof(float));
           });
}

void Stage::step(const Variant& variant, const std::vector<Sequence>& sequences, const Payload& in, const Result& out,
                 std::size_t threads, double* seconds, bool processor_time, std::size_t end) {
  Work work(variant, sequences);
  if (work.rows == 0) return;
  const Settings& all = settings_;
  const std::size_t queries = all.heads * all.head_size, rows = work.rows;
  const auto room = [](std::vector<float>& memory, std::size_t size) {
    if (memory.size() < size) memory.resize(size);
  };
  room(hidden_, rows * all.hidden);
  room(normed_, rows * all.hidden);
  room(raw_, rows * all.hidden);
  room(qkv_, rows * (queries + 2 * all.kv_heads * all.head_size));
  room(context_, rows * queries);
  room(inner_, rows * all.inner);
  for (const std::size_t width : {all.hidden, queries, all.inner}) operands_[width].resize(all.weights, rows, width);
  if (scratch_.size() < threads) scratch_.resize(threads);
  find_angles(work);

  std::vector<float>& first = first_ % kLayers == 1 ? context_ : first_ % kLayers == 3 ? inner_ : hidden_;
  read_rows(all.stream, in.first, rows * width_after(first_), first.data());
  if (has_skip_after(first_)) read_rows(all.stream, in.second, rows * all.hidden, hidden_.data());
  const auto clock = processor_time ? thread_seconds : elapsed_seconds;
  work.team.run(threads, multiplications(work), [&](std::size_t thread) {
    const bool times = seconds != nullptr && thread == 0;
    double before = times ? clock() : 0;
    for (std::size_t layer = first_; layer < std::min(end, end_); ++layer) {
      Block& block = blocks_[layer / kLayers];
      switch (layer % kLayers) {
        case 0: attention(work, thread, block); break;
        case 1: project(work, thread, block.proj, block.proj_bias, block.attention_end, context_, queries); break;
        case 2: mlp_in(work, thread, block); break;
        default: project(work, thread, block.down, block.down_bias, block.mlp_end, inner_, all.inner); break;
      }
      if (!times) continue;
      const double now = clock();
      seconds[layer - first_] = now - before;
      before = now;
    }
  });
  const std::vector<float>& last = end_ % kLayers == 1 ? context_ : end_ % kLayers == 3 ? inner_ : hidden_;
  write_rows(variant, all.stream, last.data(), rows * width_after(end_), out.first);
  if (has_skip_after(end_)) write_rows(variant, all.stream, hidden_.data(), rows * all.hidden, out.second);
}

Head::Head(Type weights, Type stream, std::size_t hidden, std::size_t tokens, bool norm_centred, float eps, float scale,
           float cap)
    : stream_(stream), hidden_(hidden), norm_centred_(norm_centred), eps_(eps), scale_(scale), cap_(cap),
      matrix_(weights, tokens, hidden) {}

void Head::score(const Variant& variant, const void* hidden, std::size_t rows, float* scores, std::size_t threads) {
  if (rows == 0) return;
  operand_.resize(matrix_.type(), rows, hidden_);
  const Norm norm = norm_of(norm_, hidden_, norm_centred_, eps_);
  const std::size_t row_bytes = hidden_ * (stream_ == Type::kFloat32 ? sizeof(float) : sizeof(Half));
  if (scratch_.size() < threads) scratch_.resize(threads);
  Team team;
  team.run(threads, rows * matrix_.outputs() * hidden_, [&](std::size_t thread) {
    std::vector<float>& own = scratch_[thread].row;
    own.resize(hidden_);
    team.share(rows, [&](std::size_t row) {
      read_rows(stream_, static_cast<const char*>(hidden) + row * row_bytes, hidden_, own.data());
      if (norm.weight != nullptr) variant.normalise(norm, own.data(), hidden_, own.data());
      operand_.set(variant, row, own.data());
    });
    std::vector<float>& sums = scratch_[thread].sums;
    multiply(
        team, variant, operand_, matrix_, nullptr, sums, sums,
        [&](std::size_t row, std::size_t first, std::size_t count, float* values, float*) {
          float* to = scores + row * matrix_.outputs() + first;
          if (to != values) std::memcpy(to, values, count * sizeof(float));
          add_bias(to, bias_, first, count);
          if (scale_ != 1) {
            for (std::size_t i = 0; i < count; ++i) to[i] *= scale_;
          }
          if (cap_ != 0) variant.cap(to, cap_, count);
        },
        scores);
  });
}

}  // namespace pipeedge::decoder
