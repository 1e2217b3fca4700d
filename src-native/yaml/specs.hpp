// The scheduler's YAML files as plain data, and the Problem that they describe together.
//
//   models.yml            model -> layers, mem_MB, parameters_in, parameters_out; for text optionally tokens,
//                                  parameters_in_per_token, parameters_out_per_token; optionally shared_with
//   device_types.yml      type  -> bw_Mbps, mem_MB, model_profiles: model -> [batch_size, dtype, time_s,
//                                  receive_s, send_s, activations_MB, weights_MB, feed_s, collect_s,
//                                  threads, kernels]   (optional from receive_s on); for text optionally
//                                  tokens, and lengths: [tokens, time_s, ...] for other lengths
//   devices.yml           type  -> [host]
//   device_neighbors.yml  host  -> neighbour -> bw_Mbps, latency_s           (optional)
//
// A file is always checked completely, whatever is used of it. Unknown keys are ignored, because profiles
// may contain more than the scheduler reads. Only this file converts units.
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
constexpr double kBytesPerSecondPerMbps = (1 << 20) / 8.0;  // bw_Mbps counts 2^20 bits per second

struct ModelSpec {
  std::string name;
  int line = 0;
  Model model;                         // model.layers() may be 0
  // For text, if given: the sentence length of the sizes, and how they grow with it.
  double tokens = 0;                   // 0: unknown
  double elements_in_per_token = 0;
  std::vector<double> elements_out_per_token;
};

struct Profile {
  double batch_size = 0;
  std::string dtype;                   // without "torch."
  int line = 0;                        // line of time_s
  std::vector<double> time_s;
  // Empty if the profile does not have them:
  std::vector<double> receive_s;
  std::vector<double> send_s;
  std::vector<double> activation_bytes;
  std::vector<double> weight_bytes;
  double threads = 0;                  // 0: unknown
  std::string kernels;                 // with which it was profiled; empty: unknown
  double feed_s = 0;
  double collect_s = 0;
  double tokens = 0;                   // sentence length; 0 if unknown or not text
  std::vector<Profile> lengths;        // profiles of other lengths; batch_size and dtype are not repeated
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

// Each with the name of its file, for messages that compare two files.
template <typename T>
struct SpecFile {
  std::string name;
  std::vector<T> entries;
};
using Models = SpecFile<ModelSpec>;
using DeviceTypes = SpecFile<TypeSpec>;
using Devices = SpecFile<TypeHosts>;
using Neighbors = SpecFile<NeighborSpec>;

// All of these throw SpecError.
Models models_from(const Document& document);
DeviceTypes device_types_from(const Document& document);
Devices devices_from(const Document& document);
Neighbors neighbors_from(const Document& document);

// Returns the short name of a dtype, without "torch.".
std::string_view short_dtype(std::string_view dtype);

// A request for a schedule.
struct Request {
  std::string model = "google/vit-base-patch16-224";
  double batch_size = 8;
  std::string dtype = "torch.float32";
  std::map<std::string, std::string> dtype_of;  // device type -> dtype; if not empty, other types are not used
  double buffers_in = 2;
  double buffers_out = 2;
  std::string data_host;               // empty: links from and to the data rank do not count
  double tokens = 0;                   // of the longest sentence; 0: as profiled
  double input_bytes = -1;             // of one item of input; negative: according to models.yml and the dtype
  std::vector<std::string> hosts;      // hosts to schedule on, from the devices file; empty: all
};

// A host that cannot be used, with the reason.
struct LeftOut {
  std::string host;
  std::string type;
  std::string why;
};

// Details of a device type besides its costs.
struct TypeNotes {
  std::string dtype;                   // without "torch."; empty on a data host without a profile
  double threads = 0;                  // number of threads it was profiled with; 0: unknown
  std::string kernels;                 // kernels it was profiled with; empty: unknown
  std::vector<double> tokens;          // sentence lengths it was profiled with, shortest first
};

struct Assembly {
  Problem problem;                     // passes validate()
  std::vector<TypeNotes> notes;        // for each of problem.types
  std::vector<LeftOut> left_out;
  std::vector<std::string> warnings;   // one line each
};

// Throws SpecError if the files do not contain what the request needs.
Assembly assemble(const Models& models, const DeviceTypes& types, const Devices& devices,
                  const Neighbors* neighbors, const Request& request);

// Up to `limit` names without quotes, separated by commas: "a, b, c and 4 more"; "none" if empty.
std::string listing(const std::vector<std::string>& names, std::size_t limit = 6);

// The name nearest to `wanted` by edit distance, if it is near enough to be a typing error; else empty.
std::string nearest(const std::string& wanted, const std::vector<std::string>& names);

}  // namespace pipeedge::yaml
