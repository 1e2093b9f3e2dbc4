package verify

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// TestHistories runs histories in pools on filesystems that make copies in different ways.
func TestHistories(t *testing.T) {
	t.Parallel()
	binary := program(t)
	for _, one := range []struct {
		name, fsType string
		// option is a mount option. attribute is set on the pool's directory with chattr(1).
		option, attribute string
	}{
		{"xfs", "xfs", "", ""},
		{"btrfs", "btrfs", "", ""},
		{"btrfs-nocow", "btrfs", "", "+C"},
		{"btrfs-zstd", "btrfs", "compress=zstd", ""},
		{"ext4", "ext4", "", ""},
	} {
		t.Run(one.name, func(t *testing.T) {
			t.Parallel()
			var options []string
			if one.option != "" {
				options = append(options, one.option)
			}
			dir := filepath.Join(testenv.Filesystem(t, one.fsType, "64G", options...), "pool")
			must(t, os.Mkdir(dir, 0o755))
			if one.attribute != "" {
				testenv.Run(t, "chattr", one.attribute, dir)
			}
			medium := backendtest.Medium{Config: pool.Config{Directory: pool.Directory{Path: dir}, Overcommit: 100}, Dir: dir}
			g := &testDriver{medium: medium, shares: one.fsType != "ext4", subvolumes: one.fsType == "btrfs", kinds: targets.On(pool.KindDirectory, backendtest.Snapshots)}
			g.serve(t, binary)
			g.run(t)
		})
	}
}
