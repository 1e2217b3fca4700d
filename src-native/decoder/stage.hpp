// The blocks of a stage of a decoder, with their cache: a step is one call. Plain C++17, no I/O.
//
// A block has four layers, with a cut after each. D hidden, H * E the heads' queries, I inner width:
//
//   attention      q, k, v of norm(x), cache, attention      context [H * E], x [D]
//   projection     x + norm(proj(context))                   x [D]
//   mlp in         act(gate(norm(x))) * up(norm(x))          inner [I], x [D]
//   mlp out        x + norm(down(inner))                     x [D]
//
// A norm may be before, after, or both. What crosses a cut is rounded to the stream's type there, whether a stage ends
// at it or not, so that every division into stages gives the same bits.
//
// The cache is addressed from outside: a sequence has a list of pages for blocks that attend to everything, and one
// for those with a window, in which pages that the window has left may appear again. Position p is in place p % 32 of
// page p / 32 of the list. A page has the keys of each of its heads, as columns of products, and the values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "../parallel/team.hpp"
#include "linear.hpp"

namespace pipeedge::decoder {

/// Positions of a page.
constexpr std::size_t kPage = kColumns;

/// Layers of a block.
constexpr std::size_t kLayers = 4;

/// What is normed of queries and keys.
enum class HeadNorm { kNone, kEachHead, kAllHeads };

/// Angles by which queries and keys are rotated: value i of a head and the one `frequencies.size()` behind it are a point
/// that turns about the origin.
struct Rotation {
  std::vector<float> frequencies;  // radians a position
  float factor = 1;                // of sines and cosines
  /// Beyond this number of positions, the base of the frequencies grows with the position: dynamic scaling. 0: never.
  std::size_t dynamic_from = 0;
  double base = 0, stretch = 0;
};

/// What all blocks have in common.
struct Settings {
  std::size_t hidden = 0, heads = 0, kv_heads = 0, head_size = 0, inner = 0;
  Type weights = Type::kFloat32;  // of the matrices of blocks, of which some may have 8 bits for 4
  Type stream = Type::kFloat32;
  bool norm_centred = false;
  float eps = 0;
  HeadNorm head_norm = HeadNorm::kNone;
  bool gated = true;
  Activation activation = Activation::kSilu;
  float scale = 1;           // of scores
  float score_cap = 0;       // or 0
  float residual_scale = 1;  // of what a residual is added to
  std::vector<Rotation> rotations;
  /// Queries grow by `temper` times the logarithm of 1 + position / `temper_from`, rounded down; 0: they do not.
  std::size_t temper_from = 0;
  float temper = 0;
};

/// What a block has of its own, and its weights.
struct Block {
  int rotation = -1;       // or -1
  std::size_t window = 0;  // positions that a query reaches, its own included; 0: all
  Matrix qkv, proj, gate, up, down;
  std::vector<float> qkv_bias, proj_bias, gate_bias, up_bias, down_bias;
  /// Norms before and behind attention and MLP, and of queries and keys: weights, then biases of a LayerNorm.
  std::vector<float> attention_norm, mlp_norm, attention_end, mlp_end, query_norm, key_norm;
  Memory cache;
};

/// The rows of one sequence in a step.
struct Sequence {
  const std::int32_t* pages = nullptr;
  std::size_t page_count = 0;
  const std::int32_t* window_pages = nullptr;
  std::size_t window_page_count = 0;
  std::size_t position = 0;  // of the first row
  std::size_t rows = 0;
};

/// Payload of a cut: [rows, width] of the stream's type, the second one null where there is none.
struct Payload {
  const void* first = nullptr;
  const void* second = nullptr;
};
struct Result {
  void* first = nullptr;
  void* second = nullptr;
};

/// Consecutive layers of a model with their cache.
class Stage {
 public:
  /// Layers from `first` to the one before `end` of the blocks given, counted from the first block's first layer.
  Stage(Settings settings, std::vector<Block> blocks, std::size_t first, std::size_t end, std::size_t pages,
        std::size_t window_pages);

  const Settings& settings() const { return settings_; }
  /// Width of the first tensor of the payload of the cut after so many layers; the second one's is `hidden` or 0.
  std::size_t width_after(std::size_t layers) const;
  bool has_skip_after(std::size_t layers) const { return layers % 2 != 0; }
  std::size_t first() const { return first_; }
  std::size_t end() const { return end_; }
  std::size_t pages() const { return pages_; }
  std::size_t window_pages() const { return window_pages_; }
  std::size_t cache_bytes() const;
  std::size_t weight_bytes() const;
  /// Whether some block here attends to everything, or has a window.
  bool attends(bool windowed) const;

  /// A block of the stage, for filling in its weights. Matrices of layers that the stage does not have are empty.
  Block& block(std::size_t number);
  std::size_t blocks() const { return blocks_.size(); }
  /// Uses a layer of another stage, weights and cache, in place of an own one; both count from the first block's first
  /// layer, and it is the same one of its block.
  void adopt(std::size_t layer, const Stage& other, std::size_t others_layer);
  /// Bytes of a page of a block that has a cache.
  std::size_t page_bytes() const { return settings_.kv_heads * 2 * head_bytes(); }
  /// Returns the keys and values of a page of a block, or null if the block has no cache here.
  char* page(std::size_t block, std::size_t number) const {
    return owns(block, 0) ? keys_of(blocks_.at(block), number, 0) : nullptr;
  }

  /// Sets all keys and values to 0. Only then has the system provided the memory of the whole cache: before, all that
  /// nothing was written to may be one page of zeros, which reading finds in the caches of the processor.
  void clear_cache();

  /// Executes a step. Pages and positions must have been checked. `seconds`: if not null, gets those of each layer,
  /// of the calling thread's processor time if `processor_time`. Layers from `end` on are left out, and the result is
  /// unspecified then.
  void step(const Variant& variant, const std::vector<Sequence>& sequences, const Payload& in, const Result& out,
            std::size_t threads, double* seconds = nullptr, bool processor_time = false,
            std::size_t end = static_cast<std::size_t>(-1));

 private:
  struct Work;
  /// Returns the number of multiplications of a step, by weights and by the cache.
  std::size_t multiplications(const Work& work) const;
  /// Memory of one thread.
  struct Scratch {
    std::vector<float> sums, more, scores, totals;
    Operand queries;
  };
  /// Consecutive rows of one sequence that attend once all of them are written.
  struct Span {
    std::size_t sequence, row, position, rows;
  };

  bool owns(std::size_t block, std::size_t layer) const;
  void find_angles(const Work& work);
  void attention(Work& work, std::size_t thread, Block& block);
  void rotate(const Work& work, const Block& block, std::size_t row);
  void write(const Work& work, Block& block, std::size_t row) const;
  void attend(const Work& work, const Block& block, const Span& span, std::size_t first_head, std::size_t heads,
              Scratch& scratch);
  void project(Work& work, std::size_t thread, const Matrix& matrix, const std::vector<float>& bias,
               const std::vector<float>& end_norm, const std::vector<float>& x, std::size_t width);
  void mlp_in(Work& work, std::size_t thread, const Block& block);
  void prepare(Work& work, const std::vector<float>& norm, const std::vector<float>& x, std::size_t width);
  std::size_t page_of(const Work& work, const Block& block, std::size_t sequence, std::size_t page) const;
  char* keys_of(const Block& block, std::size_t page, std::size_t head) const;

  std::size_t padded_head() const { return (settings_.head_size + kColumns - 1) / kColumns * kColumns; }
  std::size_t cache_value_bytes() const { return settings_.stream == Type::kFloat32 ? sizeof(float) : sizeof(Half); }
  /// Bytes of the keys, or of the values, of one head in a page.
  std::size_t head_bytes() const { return padded_head() * kPage * cache_value_bytes(); }

  Settings settings_;
  std::vector<Block> blocks_;
  std::size_t first_, end_, pages_, window_pages_;
  // Memory of a step.
  std::vector<float> hidden_, qkv_, context_, inner_, raw_, normed_, cosines_, sines_;
  std::map<std::size_t, Operand> operands_;  // by their width
  std::vector<Scratch> scratch_;
};

/// Last norm and head of a model: hidden states to scores of all tokens.
class Head {
 public:
  Head(Type weights, Type stream, std::size_t hidden, std::size_t tokens, bool norm_centred, float eps, float scale,
       float cap);
  Matrix& matrix() { return matrix_; }
  const Matrix& matrix() const { return matrix_; }
  std::vector<float>& norm() { return norm_; }
  std::vector<float>& bias() { return bias_; }
  std::size_t hidden() const { return hidden_; }
  /// Computes scores [rows, tokens] of hidden states [rows, hidden] of the stream's type.
  void score(const Variant& variant, const void* hidden, std::size_t rows, float* scores, std::size_t threads);
  Type stream() const { return stream_; }

 private:
  Type stream_;
  std::size_t hidden_;
  bool norm_centred_;
  float eps_, scale_, cap_;
  Matrix matrix_;
  std::vector<float> norm_, bias_;
  // Memory of a call; that of each thread has a row, and sums.
  struct Scratch {
    std::vector<float> row, sums;
  };
  Operand operand_;
  std::vector<Scratch> scratch_;
};

}  // namespace pipeedge::decoder
