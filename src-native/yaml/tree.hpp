// A YAML file as a tree that remembers its lines, read with limits on everything a file can inflate.
//
//   file --read_text--> text --parse--> Document --View--> numbers, names, lists, maps
//        (size, UTF-8)        (depth, nodes, aliases,      (type, range; errors with file, line, key)
//                              duplicate keys)
//
// This directory alone knows of yaml-cpp, and of it only the event parser: it keeps no tree of its
// own, so that depth, size, aliases and duplicate keys are judged here, once, for every version.
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
constexpr std::size_t kMaxNodes = 4'000'000;   // counted with every alias written out
constexpr std::size_t kMaxDepth = 32;          // the deepest of our documents has 6
constexpr double kLargestNumber = 1e15;        // sums and products of such numbers stay finite

// A document that does not say what it must. what(): one line, "FILE:LINE: KEY: what is wrong".
class SpecError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `text` on one line, control characters replaced, cut after `limit` bytes: for messages.
std::string printable(std::string_view text, std::size_t limit = 80);

struct Node {
  enum class Kind { kNull, kScalar, kSequence, kMap };

  Kind kind = Kind::kNull;
  bool plain = true;                  // a scalar without quotes
  int line = 0;                       // from 1
  std::size_t weight = 0;             // nodes below and including this one, aliases written out; 0: open
  std::string text;                   // of a scalar
  std::vector<const Node*> children;  // of a sequence; of a map: key, value, key, value, ...
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
  double largest() const { return largest_; }  // number that is accepted

 private:
  friend Document parse(const std::string& text, std::string name, double largest);
  friend class TreeBuilder;

  std::string name_;
  double largest_ = kLargestNumber;
  std::deque<Node> nodes_;            // a deque: addresses stay as it grows
  const Node* root_ = nullptr;
};

// One node with the way to it: what the readers of specs.cpp hold. It must not outlive its Document.
class View {
 public:
  explicit View(const Document& document) : document_(&document), node_(&document.root()) {}

  [[noreturn]] void fail(const std::string& what) const;

  bool is_null() const { return node_->kind == Node::Kind::kNull; }
  int line() const { return node_->line; }

  // Of a map. A missing file-level map (an empty document, `key:` without a value) has no entries.
  std::vector<std::pair<std::string, View>> entries() const;
  View at(std::string_view key) const;                  // fails where the key is missing
  std::optional<View> find(std::string_view key) const;

  std::vector<View> items() const;                      // of a sequence; null: none

  bool is_whole_number() const;                         // one that whole_number() accepts
  bool is_text(std::string_view wanted) const;          // a scalar that is written so
  std::string text() const;                             // any scalar, as it is written
  double number(double least = 0) const;                // finite, at least `least`, at most kLargestNumber
  double whole_number(double least = 0) const;          // ... without a fraction
  std::vector<double> numbers() const;                  // a sequence of them; null: none
  std::vector<double> whole_numbers() const;

 private:
  View(const View& parent, const Node& node, std::string_view step);
  [[noreturn]] void wrong_kind(const char* wanted) const;
  double parse_number(const Node& node, double least, bool whole, std::optional<std::size_t> entry) const;
  std::vector<double> sequence_of_numbers(bool whole) const;

  const Document* document_;
  const Node* node_;
  std::string path_;                  // "google/vit-base-patch16-224: mem_MB"
};

// The whole of a regular file of at most kMaxFileBytes. Throws SpecError.
std::string read_text(const std::filesystem::path& file);

// `text` as one YAML document (JSON is one); `name` is what messages call it, `largest` the largest number it may hold. Throws SpecError.
Document parse(const std::string& text, std::string name, double largest = kLargestNumber);

}  // namespace pipeedge::yaml
