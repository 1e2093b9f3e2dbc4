package blockdev

import (
	"context"
	"fmt"
	"regexp"

	"github.com/trivet-csi/trivet/internal/command"
)

// Program is a program that this package starts.
type Program struct {
	Name string
	// Package is the name of the package with the program in Debian and most distributions.
	Package string
	// Least is the oldest version that supports the options in use. It is empty for any version.
	Least string
}

// Programs are all programs that this package starts.
var Programs = []Program{
	{"mkfs.ext4", "e2fsprogs", "1.47"}, // -E assume_storage_prezeroed
	{"e2fsck", "e2fsprogs", "1.47"},    // must support the features that mkfs.ext4 1.47 enables
	{"mkfs.xfs", "xfsprogs", "5.10"},
	{"mkfs.btrfs", "btrfs-progs", ""},
}

var versionPattern = regexp.MustCompile(`[0-9]+\.[0-9]+(\.[0-9]+)*`)

// Version returns the version that the program reports.
func (p Program) Version(ctx context.Context) (string, error) {
	out, err := command.Command{Name: p.Name, Args: []string{"-V"}}.Output(ctx)
	if err != nil {
		return "", err
	}
	version := versionPattern.FindString(out)
	if version == "" {
		return "", fmt.Errorf("%s -V reports no version: %q", p.Name, out)
	}
	return version, nil
}
