// A YAML file as a tree with line numbers, read with limits on its size, depth and aliases.
//
//   file --read_text--> text --parse--> Document --View--> numbers, names, lists, maps
//        (size, UTF-8)        (depth, nodes, aliases,      (type, range; errors with file, line, key)
//                              duplicate keys)
//
// Only this directory uses yaml-cpp, and only its event parser, which builds no tree. So depth, size, aliases
// and duplicate keys are checked here, in the same way for every version.
#pragma once

#include <cstddef>
#include <deque>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pipeedge::yaml {

constexpr std::size_t kMaxFileBytes = std::size_t{64} << 20;
constexpr std::size_t kMaxNodes = 4'000'000;  // counted with aliases expanded
constexpr std::size_t kMaxDepth = 32;         // the deepest file of the scheduler has 6
constexpr double kLargestNumber = 1e15;       // sums and products of such numbers stay finite

// A document that is invalid. what() is one line, "FILE:LINE: KEY: what is wrong".
class SpecError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `text` for messages: on one line, with control characters replaced, truncated after `limit` bytes.
std::string printable(std::string_view text, std::size_t limit = 80);

struct Node {
  enum class Kind { kNull, kScalar, kSequence, kMap };

  Kind kind = Kind::kNull;
  bool plain = true;                  // a scalar without quotes
  int line = 0;                       // from 1
  std::size_t weight = 0;             // number of nodes from this one down, with aliases expanded; 0: open
  std::string_view text;              // text of a scalar
  std::vector<const Node*> children;  // entries of a sequence, or key, value, key, value, ... of a map
};

// Owns the nodes of one file.
class Document {
 public:
  explicit Document(std::string name) : name_(std::move(name)) {}
  Document(const Document&) = delete;
  Document& operator=(const Document&) = delete;
  Document(Document&&) = default;
  Document& operator=(Document&&) = default;

  const std::string& name() const { return name_; }
  const Node& root() const { return *root_; }
  double largest() const { return largest_; }  // largest number that is accepted

 private:
  friend Document parse(std::string text, std::string name, double largest);
  friend class TreeBuilder;

  std::string name_;
  double largest_ = kLargestNumber;
  std::deque<Node> nodes_;           // a deque, because its addresses are stable
  std::vector<std::string> blocks_;  // texts of the scalars; each block has room for some
  const Node* root_ = nullptr;
};

// A node with the path to it, as used by the readers in specs.cpp. It must not outlive its Document.
class View {
 public:
  explicit View(const Document& document) : document_(&document), node_(&document.root()) {}

  [[noreturn]] void fail(const std::string& what) const;

  Node::Kind kind() const { return node_->kind; }
  bool is_null() const { return node_->kind == Node::Kind::kNull; }
  bool is_plain() const { return node_->plain; }  // whether a scalar stands without quotes
  int line() const { return node_->line; }

  // Entries of a map. A null (an empty document, `key:` without a value) has none.
  std::vector<std::pair<std::string, View>> entries() const;
  View at(std::string_view key) const;  // fails if the key is missing
  std::optional<View> find(std::string_view key) const;

  std::vector<View> items() const;  // items of a sequence; a null has none

  bool is_text(std::string_view wanted) const;  // whether it is a scalar with this text
  std::string text() const;                     // any scalar, as written
  double number(double least = 0) const;        // finite, at least `least`, at most kLargestNumber
  double whole_number(double least = 0) const;  // ... without a fraction
  // number(), or nothing where it would fail.
  std::optional<double> number_if_any(double least = 0) const;
  std::vector<double> numbers() const;  // numbers of a sequence; a null has none
  std::vector<double> whole_numbers() const;

 private:
  View(const View& parent, const Node& node, std::string_view step);
  [[noreturn]] void wrong_kind(const char* wanted) const;
  double parse_number(const Node& node, double least, bool whole, std::optional<std::size_t> entry) const;
  std::vector<double> sequence_of_numbers(bool whole) const;

  const Document* document_;
  const Node* node_;
  std::string path_;  // "google/vit-base-patch16-224: mem_MB"
};

// Reads a regular file of at most kMaxFileBytes. Throws SpecError.
std::string read_text(const std::filesystem::path& file);

// Parses `text` as one YAML document (JSON is valid too). `name` is its name in messages, `largest` the largest
// number it may contain. Throws SpecError.
Document parse(std::string text, std::string name, double largest = kLargestNumber);

// Reads and parses a file. Throws SpecError.
Document read_document(const std::string& file);

}  // namespace pipeedge::yaml
