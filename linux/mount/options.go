package mount

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Options are mount flags, separated into flags of the mount and options of the filesystem.
type Options struct {
	// Attr holds the flags of the mount itself (MOUNT_ATTR_*, fsmount(2)).
	Attr uint64
	// Data holds the options of the filesystem, each `key` or `key=value`.
	Data []string
}

// attributes are the flags of a mount, not of its filesystem.
var attributes = map[string]uint64{
	"nosuid":      unix.MOUNT_ATTR_NOSUID,
	"nodev":       unix.MOUNT_ATTR_NODEV,
	"noexec":      unix.MOUNT_ATTR_NOEXEC,
	"noatime":     unix.MOUNT_ATTR_NOATIME,
	"nodiratime":  unix.MOUNT_ATTR_NODIRATIME,
	"strictatime": unix.MOUNT_ATTR_STRICTATIME,
	"nosymfollow": unix.MOUNT_ATTR_NOSYMFOLLOW,
	"ro":          unix.MOUNT_ATTR_RDONLY,
}

// defaults are flags without effect, or flags that only mount(8) uses.
var defaults = []string{
	"defaults", "rw", "suid", "dev", "exec", "async", "relatime", "diratime", "symfollow", "auto", "noauto", "nofail", "_netdev",
}

// forbidden are flags that would mount another source.
var forbidden = []string{
	"bind", "rbind", "remount", "move", "shared", "private", "slave", "unbindable", "loop", "offset", "sizelimit", "user", "users",
	"source", "device", "logdev", "rtdev", "journal_path", "journal_dev", "subvol", "subvolid",
}

// ParseFlags separates mount flags. The error is ErrBadOption if a flag would mount another source. The kernel checks
// the options of the filesystem when it mounts.
func ParseFlags(flags []string) (Options, error) {
	var o Options
	for _, flag := range flags {
		for word := range strings.SplitSeq(flag, ",") {
			if err := o.add(word); err != nil {
				return Options{}, err
			}
		}
	}
	return o, nil
}

// add adds one mount flag.
func (o *Options) add(word string) error {
	key, _, _ := strings.Cut(word, "=")
	attr, isAttr := attributes[word]
	switch {
	case slices.Contains(forbidden, key), key == "" && word != "", strings.ContainsAny(word, "\x00\n"), len(word) > 255:
		return &Error{Op: "parsing mount flag " + word, Err: ErrBadOption}
	case isAttr:
		o.Attr |= attr
	case word == "" || slices.Contains(defaults, word) || strings.HasPrefix(word, "x-"):
	default:
		o.Data = append(o.Data, word)
	}
	return nil
}

// ReadOnly adds the flag that forbids writing through the mount.
func (o Options) ReadOnly() Options {
	o.Attr |= unix.MOUNT_ATTR_RDONLY
	return o
}

// IsReadOnly reports whether the flags forbid writing.
func (o Options) IsReadOnly() bool { return o.Attr&unix.MOUNT_ATTR_RDONLY != 0 }

// statfsFlags maps mount attributes to the flags that statfs(2) returns for them.
var statfsFlags = map[uint64]int64{
	unix.MOUNT_ATTR_RDONLY:     unix.ST_RDONLY,
	unix.MOUNT_ATTR_NOSUID:     unix.ST_NOSUID,
	unix.MOUNT_ATTR_NODEV:      unix.ST_NODEV,
	unix.MOUNT_ATTR_NOEXEC:     unix.ST_NOEXEC,
	unix.MOUNT_ATTR_NOATIME:    unix.ST_NOATIME,
	unix.MOUNT_ATTR_NODIRATIME: unix.ST_NODIRATIME,

	unix.MOUNT_ATTR_NOSYMFOLLOW: 0x2000, // ST_NOSYMFOLLOW (linux/statfs.h)
}

// MatchAttr reports whether a mount with the given statfs flags has exactly the attributes in o.
func (o Options) MatchAttr(flags int64) bool {
	for attr, flag := range statfsFlags {
		if (o.Attr&attr == attr) != (flags&flag != 0) {
			return false
		}
	}
	return true
}

// With adds the attributes of another mount, which has the given statfs flags.
func (o Options) With(flags int64) Options {
	for attr, flag := range statfsFlags {
		if flags&flag != 0 {
			o.Attr |= attr
		}
	}
	return o
}
