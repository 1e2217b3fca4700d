// The scheduler's YAML files as plain data, and the Problem they make together.
//
//   models.yml            model -> layers, mem_MB, parameters_in, parameters_out; for text optionally tokens,
//                                  parameters_in_per_token, parameters_out_per_token
//   device_types.yml      type  -> bw_Mbps, mem_MB, model_profiles: model -> [batch_size, dtype, time_s,
//                                  receive_s, send_s, activations_MB, weights_MB, feed_s, collect_s,
//                                  threads]   (all from receive_s on optional); for text
//                                  optionally tokens, and lengths: [tokens, time_s, ...], the same of others
//   devices.yml           type  -> [host]
//   device_neighbors.yml  host  -> neighbour -> bw_Mbps, latency_s           (optional)
//
// A file is checked wholly, whatever is asked of it; keys that are not known are ignored (profiles may
// carry more than the scheduler reads). Units change here and nowhere else.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../core/problem.hpp"
#include "tree.hpp"

namespace pipeedge::yaml {

constexpr double kBytesPerMB = 1 << 20;             // mem_MB counts 2^20 bytes
constexpr double kBytesPerSecondPerMbps = (1 << 20) / 8.0;  // bw_Mbps counts 2^20 bits a second

struct ModelSpec {
  std::string name;
  int line = 0;
  Model model;                         // model.layers() may be 0
  // Of text, where the file says it: the sentence length of the sizes, and how they grow with it.
  double tokens = 0;                   // 0: unknown
  double elements_in_per_token = 0;
  std::vector<double> elements_out_per_token;
};

struct Profile {
  double batch_size = 0;
  std::string dtype;                   // without "torch."
  int line = 0;                        // of time_s
  std::vector<double> time_s;
  // Where the profile has them, else empty:
  std::vector<double> receive_s;
  std::vector<double> send_s;
  std::vector<double> activation_bytes;
  std::vector<double> weight_bytes;
  double threads = 0;                  // 0: unknown
  double feed_s = 0;
  double collect_s = 0;
  double tokens = 0;                   // of a sentence; 0: unknown, or not of text
  std::vector<Profile> lengths;        // the same of other lengths; batch_size and dtype are not repeated
};

struct TypeSpec {
  std::string name;
  double bw_bytes_per_s = 0;
  double mem_bytes = 0;
  std::map<std::string, std::vector<Profile>> profiles;  // by model
};

struct TypeHosts {
  std::string type;
  std::vector<std::string> hosts;
};

struct NeighborSpec {
  std::string from;
  std::string to;
  double bw_bytes_per_s = 0;
  double latency_s = 0;
};

// Each with the name of the file it came from, for the messages that compare two files.
template <typename T>
struct SpecFile {
  std::string name;
  std::vector<T> entries;
};
using Models = SpecFile<ModelSpec>;
using DeviceTypes = SpecFile<TypeSpec>;
using Devices = SpecFile<TypeHosts>;
using Neighbors = SpecFile<NeighborSpec>;

// All throw SpecError.
Models models_from(const Document& document);
DeviceTypes device_types_from(const Document& document);
Devices devices_from(const Document& document);
Neighbors neighbors_from(const Document& document);

// "torch.float32" and "float32" are one dtype: the second.
std::string_view short_dtype(std::string_view dtype);

// What is to be scheduled.
struct Request {
  std::string model = "google/vit-base-patch16-224";
  double batch_size = 8;
  std::string dtype = "torch.float32";
  std::map<std::string, std::string> dtype_of;  // device type -> dtype; not empty: others take no part
  double buffers_in = 2;
  double buffers_out = 2;
  std::string data_host;               // empty: links from and to the data rank are not counted
  double tokens = 0;                   // of the longest sentence; 0: as it was profiled
  double input_bytes = -1;             // of one item of input; negative: as models.yml and the dtype say
  std::vector<std::string> hosts;      // of the devices file, those to schedule on; empty: all
};

// A host that cannot take part, and why.
struct LeftOut {
  std::string host;
  std::string type;
  std::string why;
};

// What is known of a device type beside what it costs.
struct TypeNotes {
  std::string dtype;                   // without "torch."; empty on a data host without a profile
  double threads = 0;                  // with which it was profiled; 0: unknown
  std::vector<double> tokens;          // sentence lengths with which it was profiled, shortest first
};

struct Assembly {
  Problem problem;                     // passes validate()
  std::vector<TypeNotes> notes;        // of each of problem.types
  std::vector<LeftOut> left_out;
  std::vector<std::string> warnings;   // one line each
};

// Throws SpecError where the files together cannot answer the request.
Assembly assemble(const Models& models, const DeviceTypes& types, const Devices& devices,
                  const Neighbors* neighbors, const Request& request);

// Up to `limit` names, quoted by nothing, joined by commas: "a, b, c and 4 more"; "none" for none.
std::string listing(const std::vector<std::string>& names, std::size_t limit = 6);

// The name nearest to `wanted` by edit distance, if one is near enough to be a slip; else empty.
std::string nearest(const std::string& wanted, const std::vector<std::string>& names);

}  // namespace pipeedge::yaml
