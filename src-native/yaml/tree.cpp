#include "tree.hpp"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <istream>
#include <streambuf>
#include <system_error>
#include <unordered_set>

namespace pipeedge::yaml {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

// Lines count from 1; 0 means the file as a whole.
[[noreturn]] void fail_at(const std::string& name, int line, const std::string& what) {
  std::string message = printable(name, 400);
  if (line > 0) message += ":" + std::to_string(line);
  throw SpecError(message + ": " + what);
}

// Length of the UTF-8 sequence at text[at], or 0 if there is none.
std::size_t utf8_length(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  const std::size_t length = lead < 0x80   ? 1
                             : lead < 0xC2 ? 0
                             : lead < 0xE0 ? 2
                             : lead < 0xF0 ? 3
                             : lead < 0xF5 ? 4
                                           : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  }
  if (lead == 0xE0 && byte(at + 1) < 0xA0) return 0;  // overlong
  if (lead == 0xED && byte(at + 1) > 0x9F) return 0;  // surrogates
  if (lead == 0xF0 && byte(at + 1) < 0x90) return 0;  // overlong
  if (lead == 0xF4 && byte(at + 1) > 0x8F) return 0;  // beyond U+10FFFF
  return length;
}

// Whether the UTF-8 sequence at text[at] is a character that YAML forbids, or one that only some parsers
// treat as a line break.
bool is_refused(std::string_view text, std::size_t at, std::size_t length) {
  const std::string_view bytes = text.substr(at, length);
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
  if (length == 1) return (byte(0) < 0x20 && bytes.find_first_of("\t\n\r") != 0) || byte(0) == 0x7F;
  if (length == 2) return byte(0) == 0xC2 && byte(1) < 0xA0;  // U+0080 to U+009F, with the break U+0085
  if (bytes == kByteOrderMark) return at != 0;
  return bytes == "\xE2\x80\xA8" || bytes == "\xE2\x80\xA9" ||  // the breaks U+2028 and U+2029
         bytes == "\xEF\xBF\xBE" || bytes == "\xEF\xBF\xBF";
}

// Whether `text` contains only comments, directives and blank lines.
bool is_head(std::string_view text) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first != line.npos && line[first] != '#' && line[0] != '%') return false;
    text.remove_prefix(std::min(text.size(), line.size() + 1));
  }
  return true;
}

// yaml-cpp treats byte 4 as the end of the file, replaces invalid UTF-8 and drops directives after the
// document; report these instead.
void check_text(const std::string& text, const std::string& name) {
  int line = 1;
  for (std::size_t at = 0; at < text.size();) {
    const auto byte = static_cast<unsigned char>(text[at]);
    const std::size_t length = utf8_length(text, at);
    if (length == 0) fail_at(name, line, "is not UTF-8 text");
    if (is_refused(text, at, length)) {
      fail_at(name, line, "holds a control character; is this a text file?");
    }
    if (byte == '\n') ++line;
    at += length;
  }
  const std::size_t last = text.rfind("\n%");
  if (last != text.npos && !is_head(std::string_view(text).substr(0, last))) {
    fail_at(name, 1 + static_cast<int>(std::count(text.data(), text.data() + last + 1, '\n')),
            "a line starts with %, which only directives at the head of a file do");
  }
  // YAML 1.1 forbids a tab there, and YAML 1.2 does so unless a scalar follows.
  for (std::size_t at = text.find('\t'); at != text.npos; at = text.find('\t', at + 1)) {
    const std::size_t begin = at == 0 ? 0 : text.find_last_of("\r\n", at - 1) + 1;
    const std::string_view before = std::string_view(text).substr(begin, at - begin);
    if (before.find_first_not_of(" -?") == before.npos && before.find_first_of("-?") != before.npos) {
      fail_at(name, 1 + static_cast<int>(std::count(text.data(), text.data() + at, '\n')),
              "is not valid YAML: a tab cannot follow '-' or '?' there");
    }
  }
}

// `text`, changed so that yaml-cpp reads it according to the standard. yaml-cpp does not treat a single
// carriage return as a line break, and at the end of a file it neither detects a quoted scalar that is not
// closed after the last break nor a '?' or '-'.
std::string prepared(std::string text) {
  for (std::size_t at = text.find('\r'); at != text.npos; at = text.find('\r', at + 1)) {
    if (at + 1 == text.size() || text[at + 1] != '\n') text[at] = '\n';
  }
  const std::size_t last = text.rfind('\n');
  if (last == text.npos || text.find_first_not_of(" \t-?", last + 1) != text.npos) return text;
  return text + (last + 1 == text.size() ? "#" : "\n#");
}

// A text as a stream, without a copy of it.
class Bytes : public std::streambuf {
 public:
  explicit Bytes(std::string& text) { setg(text.data(), text.data(), text.data() + text.size()); }
};

// `value` of a quoted scalar in UTF-8; yaml-cpp decodes the escapes \N and \_ to the bytes 0x85 and 0xA0.
std::string repaired(const std::string& value) {
  std::string out;
  for (std::size_t at = 0; at < value.size();) {
    const std::size_t length = utf8_length(value, at);
    if (length == 0) out += '\xC2';
    out.append(value, at, std::max<std::size_t>(length, 1));
    at += std::max<std::size_t>(length, 1);
  }
  return out;
}

// Whether line `line` (from 1) of `text` is indented with a tab, which usually causes a misleading message.
bool tab_indents(const std::string& text, int line) {
  std::size_t at = 0;
  for (int l = 1; l < line && at != std::string::npos; ++l) {
    at = text.find('\n', at);
    if (at != std::string::npos) ++at;
  }
  if (at == std::string::npos) return false;
  return text.substr(at, text.find_first_not_of(" \t", at) - at).find('\t') != std::string::npos;
}

}  // namespace

std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  for (const char c : text) {
    if (out.size() >= limit) {
      while (!out.empty() && (static_cast<unsigned char>(out.back()) & 0xC0) == 0x80) out.pop_back();
      if (!out.empty() && static_cast<unsigned char>(out.back()) >= 0xC0) out.pop_back();
      return out + "...";
    }
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7F ? '?' : c;
  }
  return out;
}

// Receives the parser's events and builds the tree. Fails as soon as a limit is exceeded, so a file can
// exhaust neither the parser's stack nor memory.
class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(Document& document) : document_(document) {}

  const Node* root() const { return root_; }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    // At the end of a file, yaml-cpp treats a last word as a key, and places its value where the key is.
    if (last_key_ == mark.pos) {
      fail_at(document_.name(), mark.line + 1, "is not valid YAML: a key without a ':' behind it");
    }
    close(add(mark, Node::Kind::kNull, anchor));
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    Node& node = add(mark, Node::Kind::kScalar, anchor);
    node.text = keep(repaired(value));
    node.plain = tag != "!";
    close(node);
    last_key_ = mark.pos;
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const int line = mark.line + 1;
    const Node* target = anchor < anchors_.size() ? anchors_[anchor] : nullptr;
    if (target == nullptr) fail_at(document_.name(), line, "an alias without its anchor");
    if (target->weight == 0) fail_at(document_.name(), line, "an alias inside its own anchor");
    count(target->weight, line);
    attach(*target, line);
    last_key_ = mark.pos;
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(add(mark, Node::Kind::kSequence, anchor));
  }
  void OnSequenceEnd() override { end(); }

  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(add(mark, Node::Kind::kMap, anchor));
  }
  void OnMapEnd() override {
    finish_map(*open_.back());
    end();
  }

 private:
  void count(std::size_t nodes, int line) {
    seen_ += nodes;
    if (seen_ > kMaxNodes) {
      fail_at(document_.name(), line,
              "holds more than " + std::to_string(kMaxNodes) + " values (counted with aliases written out)");
    }
  }

  // Puts a text behind others, as a string of its own would take more memory than most texts.
  std::string_view keep(const std::string& text) {
    std::vector<std::string>& blocks = document_.blocks_;
    if (blocks.empty() || blocks.back().capacity() - blocks.back().size() < text.size()) {
      blocks.emplace_back().reserve(std::max(kBlock, text.size()));
    }
    std::string& block = blocks.back();
    block += text;
    return {block.data() + block.size() - text.size(), text.size()};
  }

  Node& add(const YAML::Mark& mark, Node::Kind kind, YAML::anchor_t anchor) {
    count(1, mark.line + 1);
    last_key_ = kNowhere;
    Node& node = document_.nodes_.emplace_back();
    node.kind = kind;
    node.line = mark.line + 1;
    if (anchor != 0) {
      if (anchor >= anchors_.size()) anchors_.resize(anchor + 1, nullptr);
      anchors_[anchor] = &node;
    }
    return node;
  }

  void open(Node& node) {
    if (open_.size() >= kMaxDepth) {
      fail_at(document_.name(), node.line, "nested deeper than " + std::to_string(kMaxDepth) + " levels");
    }
    open_.push_back(&node);
  }

  void end() {
    Node& node = *open_.back();
    open_.pop_back();
    close(node);
  }

  void close(Node& node) {
    node.weight = 1;
    for (const Node* child : node.children) node.weight += child->weight;
    attach(node, node.line);
  }

  // Adds a finished node to the one that is open.
  void attach(const Node& node, int line) {
    if (open_.empty()) {
      root_ = &node;
      return;
    }
    Node& parent = *open_.back();
    const bool is_key = parent.kind == Node::Kind::kMap && parent.children.size() % 2 == 0;
    if (is_key && node.kind != Node::Kind::kScalar) fail_at(document_.name(), line, "a key of a map must be a name");
    parent.children.push_back(&node);
  }

  // Rejects duplicate keys and applies merge keys (`<<: *base`); the map's own keys take precedence.
  void finish_map(Node& map) {
    std::unordered_set<std::string_view> keys;
    std::vector<const Node*> own;
    std::vector<const Node*> merged;  // values of merge keys
    for (std::size_t i = 0; i + 1 < map.children.size(); i += 2) {
      const Node* key = map.children[i];
      const Node* value = map.children[i + 1];
      if (key->plain && key->text == "<<") {
        if (value->kind == Node::Kind::kSequence) {
          merged.insert(merged.end(), value->children.begin(), value->children.end());
        } else {
          merged.push_back(value);
        }
        continue;
      }
      if (!keys.insert(key->text).second) {
        fail_at(document_.name(), key->line, "the key " + printable(key->text) + " comes twice");
      }
      own.push_back(key);
      own.push_back(value);
    }
    if (merged.empty()) return;
    for (const Node* source : merged) {
      if (source->kind != Node::Kind::kMap) fail_at(document_.name(), map.line, "<< must name a map or a list of maps");
      for (std::size_t i = 0; i + 1 < source->children.size(); i += 2) {
        if (!keys.insert(source->children[i]->text).second) continue;
        own.push_back(source->children[i]);
        own.push_back(source->children[i + 1]);
      }
    }
    map.children = std::move(own);
  }

  static constexpr int kNowhere = -2;
  static constexpr std::size_t kBlock = std::size_t{1} << 16;

  Document& document_;
  std::vector<Node*> open_;
  std::vector<const Node*> anchors_;  // by yaml-cpp's number, from 1
  std::size_t seen_ = 0;
  int last_key_ = kNowhere;  // position of the previous scalar or alias, which may be a key
  const Node* root_ = nullptr;
};

Document parse(std::string text, std::string name, double largest) {
  Document document(std::move(name));
  document.largest_ = largest;
  check_text(text, document.name());
  TreeBuilder builder(document);
  try {
    text = prepared(std::move(text));
    Bytes bytes(text);
    std::istream stream(&bytes);
    YAML::Parser parser(stream);
    if (parser.HandleNextDocument(builder)) document.root_ = builder.root();
    if (document.root_ == nullptr) fail_at(document.name(), 0, "is empty");
    TreeBuilder rest(document);
    if (parser.HandleNextDocument(rest)) {
      fail_at(document.name(), rest.root() == nullptr ? 0 : rest.root()->line,
              "holds a second document; one is expected");
    }
  } catch (const YAML::Exception& error) {
    const int line = error.mark.line + 1;
    fail_at(document.name(), line,
            "is not valid YAML: " + printable(error.msg, 200) +
                (tab_indents(text, line) ? "; a tab cannot indent YAML" : ""));
  }
  return document;
}

std::string read_text(const std::filesystem::path& file) {
  const std::string name = file.string();
  std::error_code error;
  const auto status = std::filesystem::status(file, error);
  if (status.type() == std::filesystem::file_type::not_found) fail_at(name, 0, "no such file");
  if (error) fail_at(name, 0, "cannot be read: " + error.message());
  if (std::filesystem::is_directory(status)) fail_at(name, 0, "is a directory, not a YAML file");
  // A pipe could block forever, and a device may never end.
  if (!std::filesystem::is_regular_file(status)) fail_at(name, 0, "is not a regular file");

  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream(std::fopen(name.c_str(), "rb"), &std::fclose);
  if (!stream) fail_at(name, 0, std::string("cannot be read: ") + std::strerror(errno));
  std::string text;
  std::vector<char> chunk(std::size_t{1} << 16);
  while (const std::size_t got = std::fread(chunk.data(), 1, chunk.size(), stream.get())) {
    if (text.size() + got > kMaxFileBytes) {
      fail_at(name, 0, "is larger than " + std::to_string(kMaxFileBytes >> 20) + " MiB, the most that is read");
    }
    text.append(chunk.data(), got);
  }
  if (std::ferror(stream.get()) != 0) fail_at(name, 0, "cannot be read completely");
  return text;
}

Document read_document(const std::string& file) { return parse(read_text(file), file); }

View::View(const View& parent, const Node& node, std::string_view step)
    : document_(parent.document_), node_(&node), path_(parent.path_) {
  if (!path_.empty()) path_ += ": ";
  path_ += printable(step);
}

void View::fail(const std::string& what) const {
  fail_at(document_->name(), node_->line, path_.empty() ? what : path_ + ": " + what);
}

void View::wrong_kind(const char* wanted) const {
  switch (node_->kind) {
    case Node::Kind::kNull: fail(std::string("has no value; ") + wanted + " is expected");
    case Node::Kind::kScalar:
      fail("is '" + printable(node_->text) + (node_->plain ? "'; " : "' in quotes; ") + wanted + " is expected");
    case Node::Kind::kSequence: fail(std::string("is a list; ") + wanted + " is expected");
    case Node::Kind::kMap: fail(std::string("is a map; ") + wanted + " is expected");
  }
  fail(std::string(wanted) + " is expected");
}

std::vector<std::pair<std::string, View>> View::entries() const {
  if (node_->kind != Node::Kind::kMap && !is_null()) wrong_kind("a map");
  std::vector<std::pair<std::string, View>> found;
  found.reserve(node_->children.size() / 2);
  for (std::size_t i = 0; i + 1 < node_->children.size(); i += 2) {
    const std::string_view key = node_->children[i]->text;
    found.emplace_back(key, View(*this, *node_->children[i + 1], key));
  }
  return found;
}

std::optional<View> View::find(std::string_view key) const {
  if (node_->kind != Node::Kind::kMap) wrong_kind("a map");
  for (std::size_t i = 0; i + 1 < node_->children.size(); i += 2) {
    if (node_->children[i]->text == key) return View(*this, *node_->children[i + 1], key);
  }
  return std::nullopt;
}

View View::at(std::string_view key) const {
  if (auto found = find(key)) return *std::move(found);
  fail("the key " + std::string(key) + " is missing");
}

std::vector<View> View::items() const {
  if (node_->kind != Node::Kind::kSequence && !is_null()) wrong_kind("a list");
  std::vector<View> found;
  found.reserve(node_->children.size());
  for (std::size_t i = 0; i < node_->children.size(); ++i) {
    found.push_back(View(*this, *node_->children[i], "entry " + std::to_string(i + 1)));
  }
  return found;
}

bool View::is_text(std::string_view wanted) const {
  return node_->kind == Node::Kind::kScalar && node_->text == wanted;
}

std::string View::text() const {
  if (node_->kind != Node::Kind::kScalar) wrong_kind("a name");
  return std::string(node_->text);
}

// `entry` is the index (from 0) of `node` in the list of this view. Its path is only computed for a
// message.
double View::parse_number(const Node& node, double least, bool whole, std::optional<std::size_t> entry) const {
  const auto here = [&] { return entry ? View(*this, node, "entry " + std::to_string(*entry + 1)) : *this; };
  const char* wanted = whole ? "a whole number" : "a number";
  if (node.kind != Node::Kind::kScalar || !node.plain) here().wrong_kind(wanted);

  // The decimal grammar that all readers share: [sign] digits [. digits] [e [sign] digits], without a leading
  // zero, which means octal in YAML 1.1.
  const std::string_view text = node.text;
  std::size_t at = 0;
  const auto digits = [&] {
    const std::size_t from = at;
    while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
    return at - from;
  };
  if (at < text.size() && (text[at] == '-' || text[at] == '+')) ++at;
  const std::size_t first = at;
  std::size_t mantissa = digits();
  const bool octal = mantissa > 1 && text[first] == '0';
  if (at < text.size() && text[at] == '.') {
    ++at;
    mantissa += digits();
  }
  bool well_formed = mantissa > 0 && !octal;
  if (well_formed && at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    ++at;
    if (at < text.size() && (text[at] == '-' || text[at] == '+')) ++at;
    well_formed = digits() > 0;
  }
  if (!well_formed || at != text.size()) here().wrong_kind(wanted);

  const double value = std::strtod(std::string(text).c_str(), nullptr);  // the C locale: nothing here sets another
  if (!(std::fabs(value) <= document_->largest())) {
    here().fail("is " + printable(text) + "; numbers may not exceed " +
                (document_->largest() == kLargestNumber ? "1,000,000,000,000,000" : "1e21"));
  }
  if (value < least) {
    here().fail("is " + printable(text) + (least == 0 ? "; it must not be negative" : "; it must be at least 1"));
  }
  if (whole && value != std::floor(value)) here().wrong_kind(wanted);
  return value;
}

double View::number(double least) const { return parse_number(*node_, least, false, std::nullopt); }
double View::whole_number(double least) const { return parse_number(*node_, least, true, std::nullopt); }

std::optional<double> View::number_if_any(double least) const {
  try {
    return number(least);
  } catch (const SpecError&) {
    return std::nullopt;
  }
}

std::vector<double> View::sequence_of_numbers(bool whole) const {
  if (node_->kind != Node::Kind::kSequence && !is_null()) wrong_kind("a list of numbers");
  std::vector<double> found;
  found.reserve(node_->children.size());
  for (std::size_t i = 0; i < node_->children.size(); ++i) {
    found.push_back(parse_number(*node_->children[i], 0, whole, i));
  }
  return found;
}

std::vector<double> View::numbers() const { return sequence_of_numbers(false); }
std::vector<double> View::whole_numbers() const { return sequence_of_numbers(true); }

}  // namespace pipeedge::yaml
