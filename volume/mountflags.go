package volume

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/internal/mountflags"
)

// contextFlag sets the SELinux context of a filesystem.
const contextFlag = mountflags.Context + "=CONTEXT"

// CommonMountFlags are the mount flags of every volume: per-mount flags, and flags that only mount(8)
// interprets.
var CommonMountFlags = []string{
	"ro", "rw", "suid", "nosuid", "dev", "nodev", "exec", "noexec", "symfollow", "nosymfollow",
	"noatime", "relatime", "strictatime", "diratime", "nodiratime",
	"defaults", "async", "auto", "noauto", "nofail", "_netdev",
}

// MountFlags are the mount flags of each filesystem in addition to CommonMountFlags. The part after = lists
// the allowed values, separated by |, or is N for a number, SIZE for a number with an optional unit, CONTEXT for
// an SELinux context, or TEXT. All other flags are refused, because they stop the machine (errors=panic), mount
// other data (subvol=, sb=), skip the journal (norecovery), open another device (logdev=), or are mistyped.
var MountFlags = map[string][]string{
	"ext4": {
		"sync", "dirsync", "lazytime", "nolazytime", contextFlag,
		"discard", "nodiscard", "commit=N", "data=ordered|writeback|journal", "data_err=ignore|abort", "errors=continue|remount-ro",
		"barrier", "nobarrier", "barrier=0|1", "delalloc", "nodelalloc", "dioread_lock", "dioread_nolock", "auto_da_alloc", "noauto_da_alloc",
		"acl", "noacl", "user_xattr", "nouser_xattr", "grpid", "nogrpid", "bsdgroups", "sysvgroups", "bsddf", "minixdf",
		"quota", "noquota", "usrquota", "grpquota", "prjquota", "resuid=N", "resgid=N", "i_version",
		"init_itable", "noinit_itable", "init_itable=N", "inode_readahead_blks=N", "stripe=N", "min_batch_time=N", "max_batch_time=N", "max_dir_size_kb=N",
	},
	"xfs": {
		"sync", "dirsync", "lazytime", "nolazytime", contextFlag,
		"discard", "nodiscard", "allocsize=SIZE", "inode32", "inode64", "largeio", "nolargeio", "filestreams", "swalloc", "noalign", "sunit=N", "swidth=N",
		"logbufs=N", "logbsize=SIZE", "wsync", "nouuid", "grpid", "nogrpid", "bsdgroups", "sysvgroups",
		"noquota", "quota", "usrquota", "uquota", "uqnoenforce", "qnoenforce", "grpquota", "gquota", "gqnoenforce", "prjquota", "pquota", "pqnoenforce",
	},
	"btrfs": {
		"sync", "dirsync", "lazytime", "nolazytime", contextFlag,
		"discard", "nodiscard", "discard=sync|async", "commit=N", "compress", "compress=TEXT", "compress-force", "compress-force=TEXT",
		"autodefrag", "noautodefrag", "barrier", "nobarrier", "datacow", "nodatacow", "datasum", "nodatasum", "acl", "noacl",
		"ssd", "nossd", "ssd_spread", "nossd_spread", "space_cache", "nospace_cache", "space_cache=v1|v2",
		"flushoncommit", "noflushoncommit", "treelog", "notreelog", "max_inline=SIZE", "metadata_ratio=N", "user_subvol_rm_allowed",
	},
	"nfs": {
		"sync", contextFlag,
		"nfsvers=TEXT", "vers=TEXT", "minorversion=N", "v3", "v4", "v4.0", "v4.1", "v4.2",
		"hard", "soft", "softerr", "softreval", "nosoftreval", "intr", "nointr", "timeo=N", "retrans=N",
		"rsize=N", "wsize=N", "nconnect=N", "max_connect=N", "trunkdiscovery", "notrunkdiscovery", "write=lazy|eager|wait",
		"ac", "noac", "actimeo=N", "acregmin=N", "acregmax=N", "acdirmin=N", "acdirmax=N", "cto", "nocto",
		"lookupcache=all|none|pos|positive", "fsc", "fsc=TEXT", "nofsc", "rdirplus", "nordirplus", "rdirplus=none|force", "acl", "noacl", "nosharecache",
		"lock", "nolock", "local_lock=all|flock|posix|none",
		"proto=tcp|tcp6|udp|udp6|rdma|rdma6", "tcp", "udp", "rdma", "port=N", "resvport", "noresvport",
		"mountport=N", "mountproto=tcp|tcp6|udp|udp6", "mountvers=N", "namlen=N",
		"sec=TEXT", "xprtsec=none|tls|mtls",
	},
}

// CheckMountFlags refuses (ErrInvalid) a flag that is neither common to all volumes nor in the list of one
// of the filesystems, unless it begins with x-. An element of flags may contain several flags
// (mountflags.Split).
func CheckMountFlags(flags []string, fsTypes ...string) error {
	known := slices.Clone(CommonMountFlags)
	for _, fsType := range fsTypes {
		known = append(known, MountFlags[fsType]...)
	}
	for _, word := range mountflags.Split(flags) {
		if strings.HasPrefix(word, "x-") || slices.ContainsFunc(known, func(f string) bool { return isFlag(word, f) }) {
			continue
		}
		nearest, _ := Nearest(word, known)
		return Errorf(ErrInvalid, "volume_capability.mount.mount_flags: %.80q is not allowed for %s: the nearest flag that is allowed is %s: correct mountOptions",
			word, cmp.Or(strings.Join(fsTypes, ", "), "a volume without a filesystem of its own"), nearest)
	}
	return nil
}

// flagValues are the patterns of the placeholders in MountFlags.
var flagValues = map[string]*regexp.Regexp{
	"N":    regexp.MustCompile(`^[0-9]{1,10}$`),
	"SIZE": regexp.MustCompile(`^[0-9]{1,10}[kKmMgG]?$`),
	"TEXT": regexp.MustCompile(`^[A-Za-z0-9._:-]{1,255}$`),
}

// isFlag reports whether word is flag, an entry of the lists, with an allowed value.
func isFlag(word, flag string) bool {
	key, value, given := strings.Cut(word, "=")
	flagKey, values, takes := strings.Cut(flag, "=")
	if key != flagKey || given != takes {
		return false
	}
	if form := flagValues[values]; form != nil {
		return form.MatchString(value)
	}
	if flag == contextFlag {
		_, ok := mountflags.ParseContext(value)
		return ok
	}
	return !takes || slices.Contains(strings.Split(values, "|"), value)
}
