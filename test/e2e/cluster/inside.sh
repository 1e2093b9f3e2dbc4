# shellcheck shell=bash disable=SC2154
# Sourced by the first processes of the namespaces.

# start LOG PROGRAM ARG...: in the background.
start() {
	local log=$1
	shift
	"$@" >>"$state/log/$log.log" 2>&1 &
}

# leave_mounts gives up this namespace's copies of mounts that programs outside have below
# the directory for temporary files: their devices would stay in use as long as the cluster.
leave_mounts() {
	local target
	findmnt -rno TARGET | tac | while read -r target; do
		case $(printf %b "$target") in
		"$state" | "$state"/*) ;;
		"${TMPDIR:-/tmp}"/*) umount -l "$(printf %b "$target")" || true ;;
		esac
	done
}

# The kubelet sets these for the whole machine; here it finds them as it wants them.
# Bound over /proc, so once for each pid namespace.
fake_sysctls() {
	local p
	for p in vm/overcommit_memory:1 kernel/panic:10 kernel/panic_on_oops:1; do
		echo "${p#*:}" >"$state/fake-${p//[:\/]/-}"
		mount --bind "$state/fake-${p//[:\/]/-}" "/proc/sys/${p%:*}"
	done
}

wait_for_apiserver() {
	until kubectl --kubeconfig "$state/admin.kubeconfig" get --raw /readyz >/dev/null 2>&1; do sleep 0.2; done
}

# reap takes what other processes leave to pid 1, for ever.
reap() {
	while :; do wait -n 2>/dev/null || sleep 1; done
}
