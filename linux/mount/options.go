package mount

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/mountflags"
)

// Options are mount flags, separated into flags of the mount and options of the filesystem.
type Options struct {
	// Attr holds the flags of the mount itself (MOUNT_ATTR_*, fsmount(2)).
	Attr uint64
	// Data holds the options of the filesystem, each `key` or `key=value`, except Context.
	Data []string
	// Context is the SELinux context of all files of the filesystem. If it is empty, each file has its own.
	Context string
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

// ParseFlags separates mount flags. The error is ErrBadOption if a flag would mount another source, and ErrBadContext if
// the flags set two SELinux contexts. The kernel checks the options of the filesystem when it mounts.
func ParseFlags(flags []string) (Options, error) {
	var o Options
	for _, word := range mountflags.Split(flags) {
		if err := o.add(word); err != nil {
			return Options{}, err
		}
	}
	return o, nil
}

// FilesystemFlags returns the mount flags that are options of the filesystem.
func (o Options) FilesystemFlags() []string {
	if o.Context == "" {
		return o.Data
	}
	return append(slices.Clip(o.Data), mountflags.ForContext(o.Context))
}

// add adds one mount flag.
func (o *Options) add(word string) error {
	key, value, _ := strings.Cut(word, "=")
	attr, isAttr := attributes[word]
	switch {
	case strings.HasPrefix(word, "x-"), slices.Contains(defaults, word):
	case key == mountflags.Context:
		return o.setContext(value)
	case slices.Contains(forbidden, key), key == "", strings.ContainsAny(word, "\x00\n"), len(key) > 255, len(value) > 255:
		return &Error{Op: "parsing mount flag " + word, Err: ErrBadOption}
	case isAttr:
		o.Attr |= attr
	default:
		o.Data = append(o.Data, word)
	}
	return nil
}

// setContext sets the SELinux context, of which a filesystem has only one.
func (o *Options) setContext(value string) error {
	op := "parsing mount flag " + mountflags.Context + "=" + value
	context, ok := mountflags.ParseContext(value)
	switch {
	case !ok:
		return &Error{Op: op, Err: ErrBadOption}
	case o.Context != "" && o.Context != context:
		return &Error{Op: op, Err: fmt.Errorf("%w: another flag sets %s", ErrBadContext, o.Context)}
	}
	o.Context = context
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
