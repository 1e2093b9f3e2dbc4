package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// In the functions below, name is the name of a check, and err is the error of the test that the check makes.

// judgeClosedExport judges the error of opening a pool on an export.
func judgeClosedExport(name string, err error) Check {
	if errors.Is(err, volume.ErrUnavailable) {
		return warning(name, err.Error(), "start the driver that serves the controller: it completes the pool, or creates it if nfs.init is set; or create the pool with trivet pool init")
	}
	return failure(name, err.Error(), "follow the message; the driver serves no volume of the export until then")
}

// judgePool judges a pool that could be read. anyPool is true if nfs.init is set and uuid is not. Then the driver
// would create a new pool if the disk of the server were not mounted, because a controller in a pod does not
// record the UUID of the pool.
func judgePool(name, seen string, anyPool bool) Check {
	if anyPool {
		return warning(name, seen+", and nfs.init would create a new pool on an empty export", "set uuid in the configuration")
	}
	return ok(name, "%s", seen)
}

func judgeName(name, server string, addresses []netip.Addr, err error) Check {
	if err != nil {
		return failure(name, err.Error(), "correct the server's name, or the name service of this node; a pod uses the name service of its node with hostNetwork and dnsPolicy ClusterFirstWithHostNet")
	}
	texts := make([]string, len(addresses))
	for i, a := range addresses {
		texts[i] = a.Unmap().String()
	}
	return ok(name, "%s is %s", server, strings.Join(texts, ", "))
}

// judgeServer judges the results of pings to the addresses of a server: nil if the address answers.
func judgeServer(name, port string, answers map[netip.Addr]error) Check {
	var answering, silent []string
	for a, err := range answers {
		if err == nil {
			answering = append(answering, a.Unmap().String())
		} else {
			silent = append(silent, a.Unmap().String()+": "+err.Error())
		}
	}
	slices.Sort(answering)
	slices.Sort(silent)
	const remedy = "check that nfsd runs on the server, and the network between the server and this node (firewall, route)"
	switch {
	case len(answering) == 0:
		return failure(name, "no answer at port "+port+": "+strings.Join(silent, "; "), remedy)
	case len(silent) > 0:
		return warning(name, strings.Join(answering, ", ")+" answers, but "+strings.Join(silent, "; "), remedy+"; or remove the wrong address from the DNS name of the server")
	}
	return ok(name, "answers at port %s of %s", port, strings.Join(answering, ", "))
}

// judgeVersions judges which versions of NFS work. all begins with the best version.
func judgeVersions(name string, all []versionResult) Check {
	var have, lacking []string
	reasons := map[string]string{}
	for _, s := range all {
		if s.err == nil {
			have = append(have, s.version)
			continue
		}
		lacking = append(lacking, s.version)
		reasons[s.version] = brief(s.err)
	}
	seen := cmp.Or(strings.Join(have, ", "), "none")
	if len(lacking) > 0 {
		seen += "; not " + grouped(lacking, reasons)
	}
	switch best := append(have, "none")[0]; {
	case best == "4.2" || best == "4.1":
		return ok(name, "%s", seen)
	case best == "3" && errors.Is(all[0].err, mount.ErrExportMissing):
		return warning(name, seen, "with version 4 the path of the export may differ: if an export has fsid=0, paths begin below that export; otherwise every parent directory of the export must be on a filesystem that can be exported")
	case best == "none":
		return warning(name, seen, "see the check of the export")
	}
	return warning(name, seen, "disk images need 4.1 or 4.2, directory volumes do not: enable one of these versions on the server")
}

// brief returns the reason of a mount error without the export and the remedy.
func brief(err error) string {
	for _, known := range exportRemedies {
		if errors.Is(err, known.err) {
			text, _, _ := strings.Cut(known.err.Error(), ":")
			return text
		}
	}
	return err.Error()
}

// grouped lists versions with their reasons. Adjacent versions with the same reason share one text.
func grouped(versions []string, reasons map[string]string) string {
	var parts []string
	for i, v := range versions {
		part := v
		if i+1 == len(versions) || reasons[versions[i+1]] != reasons[v] {
			part += " (" + reasons[v] + ")"
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ", ")
}

// exportRemedies holds the remedies for an export that cannot be mounted.
var exportRemedies = []remedy{
	{mount.ErrExportDenied, "allow this node's address in the server's /etc/exports, and run exportfs -ra on the server"}, //nolint:misspell // the program's name
	{mount.ErrNoGSSD, "install nfs-common or nfs-utils on this node, and run systemctl enable --now rpc-gssd"},
	{mount.ErrKerberosRefused, "run systemctl enable --now rpc-gssd and modprobe rpcsec_gss_krb5 on this node"},
	{mount.ErrPrivacy, "run a newer kernel on this node and the server, or set sec=krb5i (docs/kinds/nfs-kerberos.md)"},
	{mount.ErrKerberos, "on this node, read journalctl -u rpc-gssd; run klist -k, and kinit -k with the principal that it prints; on the server, check sec= of the export, and that rpc.svcgssd or gssproxy runs (docs/kinds/nfs-kerberos.md)"},
	{mount.ErrNoTLSHD, "install ktls-utils on this node, and run systemctl enable --now tlshd"},
	{mount.ErrTLSDenied, "read the log of tlshd on this node and on the server (journalctl -u tlshd), and check the addresses and sec= in the server's /etc/exports"},
	{mount.ErrNoTLS, "run Linux 6.5 or newer on this node, or remove xprtsec from mountOptions"},
	{mount.ErrExportMissing, "correct the path to that in the server's /etc/exports, or allow this node in that file: with version 4 an export that is not allowed appears to be missing"},
	{mount.ErrNFSVersion, "enable a version on the server that this node supports, or correct nfsvers in mountOptions"},
	{mount.ErrNoStatd, "run rpc.statd on this node (package nfs-common or nfs-utils), or use version 4"},
	{mount.ErrNoNFS, "load or install the kernel's NFS client on this node (modprobe nfs)"},
	{mount.ErrServerSilent, "check that nfsd runs on the server; version 3 also needs rpcbind and mountd"},
	{mount.ErrBadOption, "correct mountOptions: only options of the kernel are supported (docs/kinds/nfs.md)"},
	{syscall.EPERM, "run the doctor as root and privileged"},
}

func judgeMounted(name, source, version string, err error) Check {
	return judgeError(name, err, exportRemedies, serverLog, "%s, with NFS %s", source, version)
}

const (
	squashed = "export the directory with no_root_squash, and with Kerberos map the principal of this node to root (docs/kinds/nfs-kerberos.md); or change the owner of the directory to the user that root is mapped to (anonuid)"
	noSpace  = "free space on the server"
)

// writingRemedies holds the remedies for an export that cannot be written.
var writingRemedies = []remedy{
	{syscall.EROFS, "export the directory with rw, and remove ro from mountOptions"},
	{syscall.EACCES, squashed},
	{syscall.EPERM, squashed},
	{syscall.EKEYEXPIRED, "on this node, read journalctl -u rpc-gssd, and run klist -k: its ticket has expired (docs/kinds/nfs-kerberos.md)"},
	{syscall.ENOSPC, noSpace},
	{syscall.EDQUOT, noSpace},
	{syscall.ESTALE, "the exported directory was replaced: export the directory again"},
}

func judgeWriting(name string, err error) Check {
	return judgeError(name, err, writingRemedies, serverLog, "a directory was created")
}

// judgeOwners judges how the server maps users. If users need tickets, only the mapping of root can be tested.
func judgeOwners(name string, o owners, needTickets bool) Check {
	const remedy = "export the directory with no_root_squash, and with Kerberos map the principal of this node to root: drivers set mode, uid and gid of directories, and the kubelet applies fsGroup"
	switch {
	case o.err != nil:
		return failure(name, o.err.Error(), remedy)
	case o.root != 0 && o.root == o.other:
		return warning(name, fmt.Sprintf("the server maps all users to %d (all_squash)", o.root), "if this is intended, ignore this warning: classes cannot use uid and gid, and pods cannot use fsGroup; otherwise export the directory with no_root_squash")
	case o.root != 0:
		return failure(name, fmt.Sprintf("files of root belong to %d: the server maps root", o.root), remedy)
	case o.denied && needTickets:
		return ok(name, "files of root belong to root; other users need tickets and were not tested")
	case o.denied:
		return warning(name, fmt.Sprintf("user %d may not create files in a directory with mode 0777", unmappedUser), "if the export requires Kerberos, ignore this warning: users need tickets; otherwise check exports(5) and the permissions on the server")
	case o.chown != nil:
		return failure(name, o.chown.Error(), remedy)
	case o.other != unmappedUser:
		return warning(name, fmt.Sprintf("files of user %d belong to %d", unmappedUser, o.other), "check exports(5) on the server, and the ID mapping of NFS 4: both sides need the same domain, or numeric IDs")
	}
	return ok(name, "files of root belong to root, and their owner can be changed")
}

// judgeKerberos judges the programs and files of this node for Kerberos. The mount of the export shows whether they work.
func judgeKerberos(name string, k kerberos) Check {
	switch {
	case !k.gssd && !k.sure:
		return skipped(name, "this process cannot see whether rpc.gssd runs in its network, for example in a container; run trivet doctor on the node itself as root")
	case !k.gssd:
		return failure(name, "rpc.gssd does not run in the network namespace of this process", "install nfs-common or nfs-utils, and run systemctl enable --now rpc-gssd")
	case k.keytab != nil:
		return warning(name, "rpc.gssd runs; "+k.keytab.Error(), "create the keytab with a key of nfs/HOST or host/HOST, unless rpc.gssd uses another file (keytab-file in /etc/nfs.conf)")
	}
	return ok(name, "rpc.gssd runs, and %s exists", keytab)
}

func judgeRename(name string, err error) Check {
	const needed = "a pool needs renames and hard links: use an export whose filesystem supports them"
	return judgeError(name, err, nil, needed, "directories can be renamed and files linked")
}

// mostSkew is the tolerated difference between two clocks. Records and archived directories contain times
// of different machines.
const mostSkew = 30 * time.Second

func judgeClock(name string, s skew) Check {
	switch {
	case s.err != nil:
		return failure(name, s.err.Error(), serverLog)
	case s.ahead.Abs() > mostSkew:
		return warning(name, fmt.Sprintf("the server's clock differs by %v from this node's", s.ahead.Round(time.Second)), "set both by NTP: programs that compare times of files, such as make, fail")
	}
	return ok(name, "the same time as on this node")
}

func judgeFeatures(name string, all []feature) Check {
	var have, lacking, failed []string
	for _, f := range all {
		switch {
		case f.err != nil:
			failed = append(failed, f.what+": "+f.err.Error())
		case f.have:
			have = append(have, f.what)
		default:
			lacking = append(lacking, f.what)
		}
	}
	if len(failed) > 0 {
		return warning(name, strings.Join(failed, "; "), serverLog)
	}
	seen := "has " + cmp.Or(strings.Join(have, ", "), "no optional feature")
	if len(lacking) > 0 {
		seen += "; lacks " + strings.Join(lacking, ", ") + " (they need NFS 4.2; clones also need a filesystem with reflink on the server; thick images need fallocate)"
	}
	return ok(name, "%s", seen)
}

func judgeLocks(name string, t lockTest) Check {
	switch {
	case t.err != nil:
		return warning(name, t.err.Error(), "disk images need locks. A server grants none during its grace period after a start (90 s with knfsd): repeat the check then; with version 3 run rpc.statd on this node and lockd on the server, or use 4.1 or 4.2")
	case !t.visible && t.sameClient != nil:
		return skipped(name, "locks between two nodes could not be tried from this node, because the mount with a second version of NFS failed: "+brief(t.sameClient))
	case !t.visible:
		return warning(name, "locks are local to this node, or not supported", "remove nolock and local_lock from mountOptions, because two nodes could attach one image")
	}
	return ok(name, "the server supports locks")
}

// judgeLostLocks judges the module parameter nfs.recover_lost_locks.
func judgeLostLocks(name, parameter string) Check {
	switch parameter {
	case "N":
		return ok(name, "after a lock is lost, its holder cannot write")
	case "":
		return skipped(name, "/sys/module/nfs/parameters/recover_lost_locks does not exist")
	}
	return warning(name, "nfs.recover_lost_locks is "+parameter+": a node that has lost its lock continues to write",
		"options nfs recover_lost_locks=N in /etc/modprobe.d, then reload the module or restart the node; until then no image is attached")
}

func clientTracking(name string) Check {
	return skipped(name, "a client cannot check whether the server tracks clients: with knfsd, nfsdcld must be active on the server (systemctl status nfsdcld), or a restart of the server drops the locks of images")
}

// judgeIdentity judges the NFS client identity of this node. registered is the node that registered the
// identity in the pool, or empty.
func judgeIdentity(name, node, identity, registered string, err error) Check {
	const remedy = "give each node its own identifier in /sys/fs/nfs/net/nfs_client/identifier, or as the module parameter nfs.nfs4_unique_id, before anything is mounted"
	switch {
	case err != nil:
		return warning(name, err.Error(), "give the driver the host's /sys; follow the message")
	case registered == "":
		return ok(name, "%s, which is new: no node has registered it", identity)
	case registered != node:
		return failure(name, fmt.Sprintf("%s is also the identity of node %q: the server would grant both the lock on one image", identity, registered), remedy)
	}
	return ok(name, "%s, which is this node's", identity)
}

// judgeQuota judges whether the server limits directories: it limits the given number of the checked ones.
func judgeQuota(name string, limited, checked int, err error) Check {
	if err != nil {
		return warning(name, err.Error(), serverLog)
	}
	return ok(name, "the server enforces the size (df) of %d of %d checked directories; the other sizes are not enforced", limited, checked)
}
