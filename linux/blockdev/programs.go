package blockdev

import (
	"context"
	"fmt"
	"regexp"

	"github.com/trivet-csi/trivet/internal/command"
)

// Program is one that this package starts.
type Program struct {
	Name string
	// Package has it, in Debian and most distributions.
	Package string
	// Least is the oldest version that knows the options it is given; empty: any.
	Least string
}

// Programs are all that this package starts.
var Programs = []Program{
	{"mkfs.ext4", "e2fsprogs", "1.47"}, // -E assume_storage_prezeroed
	{"e2fsck", "e2fsprogs", "1.47"},    // what mkfs.ext4 of that version makes
	{"mkfs.xfs", "xfsprogs", "5.10"},
	{"mkfs.btrfs", "btrfs-progs", ""},
}

var versionPattern = regexp.MustCompile(`[0-9]+\.[0-9]+(\.[0-9]+)*`)

// Version asks the program for its version.
func (p Program) Version(ctx context.Context) (string, error) {
	out, err := command.Command{Name: p.Name, Args: []string{"-V"}}.Output(ctx)
	if err != nil {
		return "", err
	}
	version := versionPattern.FindString(out)
	if version == "" {
		return "", fmt.Errorf("%s -V names no version: %q", p.Name, out)
	}
	return version, nil
}
