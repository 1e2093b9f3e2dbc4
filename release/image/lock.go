package image

import (
	_ "embed"
	"fmt"
	"strings"
)

// architecture is what Debian and ELF call a Go architecture.
type architecture struct {
	name    string // GOARCH, which is also Debian's name
	triplet string // the directory of shared libraries below /usr/lib
}

var architectures = map[string]architecture{
	"amd64": {"amd64", "x86_64-linux-gnu"},
	"arm64": {"arm64", "aarch64-linux-gnu"},
}

// programs are the programs that the driver starts, which linux/blockdev, linux/dm and linux/luks name.
var programs = []string{"/usr/sbin/mkfs.ext4", "/usr/sbin/e2fsck", "/usr/sbin/mkfs.xfs", "/usr/sbin/xfs_repair", "/usr/sbin/mkfs.btrfs", "/usr/bin/btrfs", "/usr/sbin/lvm", "/usr/sbin/cryptsetup"}

//go:embed packages.lock
var lockFile string

// Package is one line of packages.lock, a Debian package.
type Package struct {
	Arch, Name, Version string
	// SHA256 is the digest of the .deb file, in hexadecimal digits.
	SHA256 string
	URL    string
}

// lock contains the packages of all architectures.
type lock struct {
	// snapshot is the time at which snapshot.debian.org has all packages, such as 20261123T000000Z.
	snapshot string
	packages []Package
}

// parseLock reads packages.lock: a line "snapshot TIME", and a line with five words for each package.
func parseLock(text string) (*lock, error) {
	l := &lock{}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch {
		case len(words) == 0 || strings.HasPrefix(line, "#"):
		case len(words) == 2 && words[0] == "snapshot":
			l.snapshot = words[1]
		case len(words) == 5 && len(words[3]) == 64:
			l.packages = append(l.packages, Package{words[0], words[1], words[2], words[3], words[4]})
		default:
			return nil, fmt.Errorf("packages.lock: malformed line %q: run make image-lock", line)
		}
	}
	return l, nil
}

// Packages returns the Debian packages from which the images are assembled.
func Packages() ([]Package, error) {
	l, err := parseLock(lockFile)
	if err != nil {
		return nil, err
	}
	return l.packages, nil
}
