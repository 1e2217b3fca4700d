// A plugin of qemu that counts instructions: at each getpriority(2), it writes those so far to standard error.
// What qemu 7.2 and later export is declared here, as distributions do not ship its header.
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

typedef uint64_t Id;
struct qemu_plugin_tb;

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
void qemu_plugin_register_vcpu_tb_trans_cb(Id id, void (*translated)(Id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int operation, void *at, uint64_t value);
void qemu_plugin_register_vcpu_syscall_cb(Id id, void (*called)(Id, unsigned, int64_t, uint64_t, uint64_t, uint64_t,
                                                               uint64_t, uint64_t, uint64_t, uint64_t, uint64_t));

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static const int kAdd = 0;
static const int64_t kGetPriority = 141;  // on aarch64
static uint64_t count;

static void translated(Id id, struct qemu_plugin_tb *tb) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(tb, kAdd, &count, qemu_plugin_tb_n_insns(tb));
}

static void called(Id id, unsigned cpu, int64_t number, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e,
                   uint64_t f, uint64_t g, uint64_t h) {
  (void)id, (void)cpu, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;
  if (number == kGetPriority) fprintf(stderr, "instructions %" PRIu64 "\n", count);
}

__attribute__((visibility("default"))) int qemu_plugin_install(Id id, const void *info, int argc, char **argv) {
  (void)info, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_vcpu_syscall_cb(id, called);
  return 0;
}
