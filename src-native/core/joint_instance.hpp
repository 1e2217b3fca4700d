// A joint problem at one microbatch size, prepared for search.
//
//   host     one of the problem's hosts, by its index in host_names()
//   class    hosts that are alike: the same types in all settings, neither the data host nor in the links table
//   mode     a class that computes in one setting
//   group    classes whose links are alike
//   sender   a group with the element size of what it sends: all that a link needs to know of the stage before it
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "costs.hpp"
#include "instance.hpp"
#include "joint.hpp"
#include "links.hpp"

namespace pipeedge {

// Hosts and links of a joint problem, whatever their settings.
class Wiring {
 public:
  explicit Wiring(const JointProblem& problem);

  int hosts() const { return static_cast<int>(board_.hosts.size()); }
  const std::string& name(int host) const { return board_.hosts[static_cast<std::size_t>(host)].name; }
  int data_host() const { return board_.data_host; }
  bool linked(int host) const { return linked_[static_cast<std::size_t>(host)] != 0; }
  double bandwidth(int host) const { return links_->type_of(host).bw_bytes_per_s; }
  LinkSpeed speed(int from, int to) const { return links_->speed(from, to); }
  double seconds(int from, int to, double bytes) const { return links_->seconds(from, to, bytes); }
  // Index of a host in a setting's own problem; -1 if it was not profiled there.
  int in_setting(int host, int setting) const {
    return index_[static_cast<std::size_t>(setting)][static_cast<std::size_t>(host)];
  }

 private:
  Problem board_;                      // only hosts and links, each host with a type of its own
  std::unique_ptr<LinkTable> links_;
  std::vector<char> linked_;           // whether a host has an entry in the links table
  std::vector<std::vector<int>> index_;
};

// Bytes of one microbatch on a link at a cut inside the model.
double link_bytes(const Problem& sender, int bits, int cut);
// Whether a width is smaller than the sender's uncompressed values, or is none.
bool useful(const Problem& sender, int bits);
// Loss of layers [first, last) of a type in a setting.
double stage_loss(const Setting& setting, int type, int first, int last);
double width_loss(const Width& width, int cut);
// Joules that computing takes of a host, besides those of an idle one.
inline double busy_joules(const DeviceType& type, double seconds) { return (type.busy_w - type.idle_w) * seconds; }

// The data rank's host, apart from a stage there. Without a data host, all is 0.
struct DataHost {
  DataWork work;
  double busy_w = 0;                   // while it does this work; negative: unknown
  double idle_w = 0;                   // while it waits; it is on in any plan

  // Joules of so much work.
  double joules_of(double work_s) const { return (busy_w - idle_w) * work_s; }
  // Joules of a microbatch, without those of links.
  double joules(double period_s) const { return joules_of(work.both_s) + idle_w * period_s; }
  // Joules that the links add.
  double link_joules(bool first_away, bool last_away) const {
    return joules_of((first_away ? work.input_send_s : 0) + (last_away ? work.output_receive_s : 0));
  }
};
DataHost data_host_of(const JointProblem& problem, double batch_size);

struct Mode {
  int cls = 0;
  int setting = 0;                     // index into JointProblem::settings
  int type = 0;                        // index into the types of its problem
  int host = 0;                        // a host of the class, as an index into the hosts of its problem
  int level = 0;                       // of its element size, among those of the instance
};

class JointInstance {
 public:
  JointInstance(const JointProblem& problem, const Wiring& wiring, double batch_size);

  const JointProblem& problem() const { return problem_; }
  const Wiring& wiring() const { return wiring_; }
  double batch_size() const { return batch_size_; }
  int layers() const { return problem_.layers(); }

  int classes() const { return static_cast<int>(hosts_.size()); }
  const std::vector<int>& hosts(int cls) const { return hosts_[static_cast<std::size_t>(cls)]; }
  int count(int cls) const { return static_cast<int>(hosts(cls).size()); }
  int group(int cls) const { return group_[static_cast<std::size_t>(cls)]; }
  int data_class() const { return data_class_; }
  const DataHost& data() const { return data_; }

  const std::vector<Mode>& modes() const { return modes_; }
  const Problem& costs(const Mode& mode) const { return setting(mode).problem; }
  const Setting& setting(const Mode& mode) const {
    return problem_.settings[static_cast<std::size_t>(mode.setting)];
  }

  int groups() const { return static_cast<int>(members_.size()); }
  int levels() const { return static_cast<int>(element_bytes_.size()); }
  int senders() const { return groups() * levels(); }
  int sender(const Mode& mode) const { return group(mode.cls) * levels() + mode.level; }
  int level_of(int sender) const { return sender % levels(); }
  int group_of(int sender) const { return sender / levels(); }
  double element_bytes(int level) const { return element_bytes_[static_cast<std::size_t>(level)]; }
  // Some setting whose values have this element size: cuts have the same bytes in all of them.
  const Problem& costs_at(int level) const;
  // False for a single host that would send to itself.
  bool connects(int from_group, int to_group) const;
  LinkSpeed speed(int from_group, int to_group) const;
  // Whether whatever a sender can do another one can do at least as well.
  bool as_good(int sender, int other) const {
    return as_good_[static_cast<std::size_t>(sender * senders() + other)] != 0;
  }

 private:
  void classify();
  void add_modes();
  void compare_senders();

  const JointProblem& problem_;
  const Wiring& wiring_;
  double batch_size_;
  DataHost data_;
  std::vector<int> settings_;          // those of this microbatch size
  std::vector<std::vector<int>> hosts_;
  std::vector<int> group_;             // by class
  std::vector<std::vector<int>> members_;  // hosts, by group
  int data_class_ = -1;
  std::vector<Mode> modes_;
  std::vector<double> element_bytes_;  // by level, ascending
  std::vector<int> setting_at_;        // by level
  std::vector<char> as_good_;          // [sender][sender]
};

}  // namespace pipeedge
