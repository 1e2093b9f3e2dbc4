package volume_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestCheckMountFlags: only listed flags with allowed values are accepted. The error proposes the nearest flag.
func TestCheckMountFlags(t *testing.T) {
	for _, tc := range []struct {
		flags, fsTypes string
		says           string // text in the error; if it is empty, the flags must be allowed
	}{
		{"noatime,nodiratime,discard", "ext4", ""},
		{"ro relatime nosuid,nodev noexec", "nfs", ""},
		{"defaults,_netdev,nofail,x-systemd.automount,", "xfs", ""},
		{"commit=30 data=writeback errors=remount-ro nobarrier", "ext4", ""},
		{"allocsize=64m logbsize=256k prjquota nouuid inode64", "xfs", ""},
		{"compress=zstd:3 discard=async ssd autodefrag", "btrfs", ""},
		{"nfsvers=4.1,hard,nconnect=8,rsize=1048576,wsize=1048576,timeo=600,retrans=2,sec=krb5p", "nfs", ""},
		{"context=system_u:object_r:container_file_t:s0", "ext4", ""},
		{`noatime,context="system_u:object_r:container_file_t:s0:c1,c2",nodev`, "ext4", ""},
		{`x-note="a,b",x-other="a`, "ext4", ""},
		{"logbufs=8", "ext4 xfs btrfs", ""},
		{"", "ext4", ""},

		{"noatim", "ext4", `"noatim" is not allowed for ext4: the nearest flag that is allowed is noatime`},
		{"noatime,noatim", "nfs", `"noatim" is not allowed for nfs: the nearest flag that is allowed is noatime`},
		{"errors=panic", "ext4", "errors=continue|remount-ro"},
		{"errors", "ext4", "errors=continue|remount-ro"},
		{"discard=later", "btrfs", "discard=sync|async"},
		{"compres=zstd", "btrfs", "compress=TEXT"},
		{"comit=30", "ext4", "commit=N"},
		{"commit=soon", "ext4", "commit=N"},
		{"commit", "ext4", "commit=N"},
		{"noatime=1", "ext4", "noatime"},
		{"logbufs=8", "ext4", `"logbufs=8" is not allowed for ext4`},
		{"abort", "ext4", `"abort"`},
		{"sb=8193", "ext4", `"sb=8193"`},
		{"journal_path=/dev/sda", "ext4", `"journal_path=/dev/sda"`},
		{"journal_async_commit", "ext4", `"journal_async_commit"`},
		{"norecovery", "xfs", `"norecovery"`},
		{"logdev=/dev/sda", "xfs", `"logdev=/dev/sda"`},
		{"subvol=/", "btrfs", `"subvol=/"`},
		{"device=/dev/sda", "btrfs", `"device=/dev/sda"`},
		{"fatal_errors=panic", "btrfs", `"fatal_errors=panic"`},
		{"addr=192.0.2.1", "nfs", `"addr=192.0.2.1"`},
		{"bind", "xfs", `"bind"`},
		{"=", "xfs", `"="`},
		{"hard\naddr=192.0.2.1", "nfs", `"hard\naddr=192.0.2.1"`},
		{"context=a\x00b", "ext4", `context=a\x00b`},
		{"context=system_u:object_r:container_file_t:s0:c1,c2", "ext4", `"c2" is not allowed`},
		{`context="system_u:object_r:container_file_t:s0:c1`, "ext4", "context=CONTEXT"},
		{`context="system_u:object_r:container_file_t:s0:c1,c2"`, "", "volume without a filesystem of its own"},
		{"fscontext=system_u:object_r:container_file_t:s0", "xfs", `"fscontext=system_u`},
		{"defcontext=system_u:object_r:container_file_t:s0", "ext4", `"defcontext=system_u`},
		{"rootcontext=system_u:object_r:container_file_t:s0", "nfs", `"rootcontext=system_u`},
		{strings.Repeat("é", 3000), "ext4", "is not allowed"},
	} {
		fsTypes := strings.Fields(tc.fsTypes)
		err := volume.CheckMountFlags(strings.Split(tc.flags, " "), fsTypes...)
		if (err == nil) != (tc.says == "") || err != nil && (!errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says) || len(err.Error()) > 1000) {
			t.Errorf("flags %.80q for %s: got %v, want %q in the error", tc.flags, tc.fsTypes, err, tc.says)
		}
	}
}

// TestMountFlagsDocumented: docs/reference/parameters.md contains a row for each list of flags.
func TestMountFlagsDocumented(t *testing.T) {
	b, err := os.ReadFile("../docs/reference/parameters.md")
	must(t, err)
	rows := map[string][]string{"all volumes": volume.CommonMountFlags}
	for fsType, flags := range volume.MountFlags {
		rows[fsType] = flags
	}
	for name, flags := range rows {
		row := "| " + name + " | `" + strings.ReplaceAll(strings.Join(flags, "`, `"), "|", `\|`) + "` |\n"
		if !strings.Contains(string(b), row) {
			t.Errorf("docs/reference/parameters.md lacks the row\n%s", row)
		}
	}
}
