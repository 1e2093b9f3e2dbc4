#!/usr/bin/env bash
# Ends a cluster, also one that is half started, and removes all that it left,
# its state folder too (KEEP=1 keeps it, for the logs).
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/cgroups.sh"
find_state

# Loop devices belong to the machine. A path means something only inside, so the
# inode tells whether the file behind one is the node's.
loops=()
for pid in "$state"/n*/pid; do
	[ -e "$pid" ] || continue
	n=${pid%/pid} n=${n##*/n}
	# shellcheck disable=SC2016 # expanded inside
	mapfile -t -O ${#loops[@]} loops < <(IN=$n timeout 20 "$here/in.sh" bash -c '
		losetup -l -n --raw -O NAME,BACK-INO,BACK-FILE | while read -r name inode file; do
			[[ $file != /var/lib/* || $(stat -c %i "$file" 2>/dev/null) != "$inode" ]] || echo "$name"
		done' 2>/dev/null)
done

# With the first process of a pid namespace go all others, and with them their mounts
# and network. It and its parent are the only ones with these two words.
for proc in /proc/[0-9]*; do
	mapfile -d '' -t words 2>/dev/null <"$proc/cmdline" || continue
	case " ${words[*]} " in *" $here/control-plane.sh $state "*) kill -KILL "${proc#/proc/}" 2>/dev/null || true ;; esac
done

for _ in $(seq 100); do
	if remove_cgroups; then break; fi
	sleep 0.1
done
remove_cgroups || fail "cgroups named $cgroup are left"
# Twice: a pool may itself be on one.
for _ in 1 2; do
	for loop in "${loops[@]}"; do losetup -d "$loop" 2>/dev/null || true; done
done
! grep -F " $state/" /proc/self/mountinfo || fail "mounts are left"
[ -n "${KEEP:-}" ] || rm -rf "$state"
