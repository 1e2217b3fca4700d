// Linear layers whose result for a row does not depend on the other rows. Plain C++17, no I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "codings.hpp"
#include "kernels.hpp"

namespace pipeedge::decoder {

/// The variants that this processor supports, best first; the last is portable.
const std::vector<Variant>& variants();

/// Returns one of them by its name, or null.
const Variant* find_variant(const std::string& name);

/// The best of them.
const Variant& best_variant();

/// Returns a form of rows by its name, or null.
const Coding* find_coding(const std::string& name);

/// Memory that begins on a cache line, in large pages where the system has them.
class Memory {
 public:
  /// Bytes of value 0.
  explicit Memory(std::size_t bytes = 0);
  /// The same for what is kept: small pieces share large pages, without which what reading them takes depends on
  /// where the system has put the small ones. Each large page is given back when the last of its pieces is gone.
  static Memory among_others(std::size_t bytes);
  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<void> block_;  // copies share it
  char* data_ = nullptr;
  std::size_t bytes_;
};

/// Most rows of a piece: whole tiles of every variant.
constexpr std::size_t kMostPieceRows = 192;

/// Rows and columns of a product that one thread computes at a time.
struct Piece {
  std::size_t row, rows, panel, panels;
};

/// Rows of inputs in the form in which a product reads them.
class Operand {
 public:
  /// Makes room for rows of `width` values for weights of `type`.
  void resize(Type type, std::size_t rows, std::size_t width);

  /// Converts one row.
  void set(const Variant& variant, std::size_t row, const float* x);

  Type type() const { return type_; }
  std::size_t rows() const { return rows_; }
  /// A tile from a row on, whose products begin with a unit.
  Tile tile(std::size_t row, std::size_t unit) const;

 private:
  Type type_ = Type::kFloat32;
  std::size_t rows_ = 0, width_ = 0, padded_ = 0, stride_ = 0;
  Memory codes_;
  std::vector<float> scales_;
  std::vector<std::int32_t> starts_;
};

/// Inputs that are packed together, from a whole group on.
struct Span {
  std::size_t first, count;
};

/// The weights of a linear layer, packed.
class Matrix {
 public:
  Matrix() = default;
  Matrix(Type type, std::size_t outputs, std::size_t inputs);

  /// Packs weights [count, inputs] as outputs from `first` on. Halves are the bits of bfloat16.
  template <typename Value>
  void pack(std::size_t first, std::size_t count, const Value* weights, std::size_t threads = 1);

  /// Packs rows in a form of files, whose inputs are whole units. Codes are taken over where the type has them, and
  /// the weights are rounded anew where it does not. Returns whether all weights are finite.
  bool pack(std::size_t first, std::size_t count, const Coding& coding, const std::uint8_t* rows,
            std::size_t threads = 1);

  /// Writes an output of a matrix in 8 or 4 bits in our own form, which gives the same matrix when it is packed.
  void store_row(std::size_t output, std::uint8_t* row) const;

  /// Writes the weights of an output as they are used.
  void unpack(std::size_t output, float* weights) const;

  /// Computes rows [begin, end) by panels [first, last), to `sums`, rows of which lie `stride` apart.
  void multiply(const Variant& variant, const Operand& rows, std::size_t begin, std::size_t end, std::size_t first,
                std::size_t last, float* sums, std::size_t stride) const;

  /// Number of pieces into which a product with so many rows is divided for so many threads, and one of them. A piece
  /// has at most `kMostPieceRows` rows.
  std::size_t pieces(std::size_t rows, std::size_t threads) const;
  Piece piece(std::size_t rows, std::size_t threads, std::size_t number) const;

  Type type() const { return type_; }
  std::size_t outputs() const { return outputs_; }
  std::size_t inputs() const { return inputs_; }
  std::size_t panels() const { return (outputs_ + kColumns - 1) / kColumns; }
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  std::size_t piece_panels(std::size_t rows, std::size_t threads) const;
  std::size_t panel_bytes() const;
  std::size_t groups() const { return units_ * kUnit / kGroup; }
  Nibbles nibbles(std::size_t panel, std::size_t group) const;
  void read_group(std::size_t output, std::size_t number, PanelGroup& out) const;
  void write_group(std::size_t output, std::size_t count, std::size_t number, PanelGroup& group);
  std::size_t inputs_at_once() const;
  bool take_group(const Coding& coding, const std::uint8_t* row, std::size_t number, std::size_t column,
                  PanelGroup& out) const;
  template <typename Value>
  bool put_bytes(std::size_t output, std::size_t count, Span span, const Value* weights, std::size_t stride);
  template <typename Value>
  bool put(std::size_t output, std::size_t count, Span span, const Value* weights, std::size_t stride);
  template <typename Work>
  void each_part(std::size_t first, std::size_t count, std::size_t most, std::size_t threads, const Work& work) const;

  Type type_ = Type::kFloat32;
  std::size_t outputs_ = 0, inputs_ = 0;
  std::size_t units_ = 0;  // of whole groups, as a tile of AMX needs it, too
  Memory memory_;
};

}  // namespace pipeedge::decoder
