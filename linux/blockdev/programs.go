package blockdev

import (
	"cmp"
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
	// flag makes the program print its version; empty means -V.
	flag string
}

// Programs are all programs that this package starts.
var Programs = []Program{
	{Name: "mkfs.ext4", Package: "e2fsprogs", Least: "1.47"}, // -E assume_storage_prezeroed
	{Name: "e2fsck", Package: "e2fsprogs", Least: "1.47"},    // must support the features that mkfs.ext4 1.47 enables
	{Name: "mkfs.xfs", Package: "xfsprogs", Least: "5.10"},
	{Name: "xfs_repair", Package: "xfsprogs", Least: "5.10"}, // must support the features that mkfs.xfs enables
	{Name: "mkfs.btrfs", Package: "btrfs-progs"},
	{Name: "btrfs", Package: "btrfs-progs", flag: "--version"},
}

var versionPattern = regexp.MustCompile(`[0-9]+\.[0-9]+(\.[0-9]+)*`)

// Version returns the version that the program reports.
func (p Program) Version(ctx context.Context) (string, error) {
	out, err := command.Command{Name: p.Name, Args: []string{cmp.Or(p.flag, "-V")}}.Output(ctx)
	if err != nil {
		return "", err
	}
	version := versionPattern.FindString(out)
	if version == "" {
		return "", fmt.Errorf("%s reports no version: %q", p.Name, out)
	}
	return version, nil
}
