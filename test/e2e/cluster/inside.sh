# shellcheck shell=bash disable=SC2154
# Sourced by control-plane.sh and node.sh.

# start LOG PROGRAM ARG...: starts a program in the background.
start() {
	local log=$1
	shift
	"$@" >>"$state/log/$log.log" 2>&1 &
}

# leave_mounts unmounts this namespace's copies of mounts that other programs have below the
# directory for temporary files. The copies would keep their devices in use.
leave_mounts() {
	local target
	findmnt -rno TARGET | tac | while read -r target; do
		case $(printf %b "$target") in
		"$state" | "$state"/*) ;;
		"${TMPDIR:-/tmp}"/*) umount -l "$(printf %b "$target")" || true ;;
		esac
	done
}

# fake_sysctls mounts files over the sysctls that a kubelet sets for the whole machine, with
# the values that it needs. Each pid namespace has its own /proc, so call it in each.
fake_sysctls() {
	local p
	for p in vm/overcommit_memory:1 kernel/panic:10 kernel/panic_on_oops:1; do
		echo "${p#*:}" >"$state/fake-${p//[:\/]/-}"
		mount --bind "$state/fake-${p//[:\/]/-}" "/proc/sys/${p%:*}"
	done
}

wait_for_apiserver() {
	until kubectl --kubeconfig "$state/admin.kubeconfig" get --raw /readyz >/dev/null 2>&1; do sleep "$interval"; done
}

# reap reaps the orphaned processes of the namespace. It does not return.
reap() {
	while :; do wait -n 2>/dev/null || sleep 1; done
}
