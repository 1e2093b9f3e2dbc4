package emptydir

import (
	"testing"

	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// TestFrozenRecords: the limit of a volume of an earlier version is released by its record.
func TestFrozenRecords(t *testing.T) {
	frozen.JSON[record]("records").Test(t, map[string]record{
		"limited": {Version: recordVersion, Kind: quota.XFS, ID: 1 << 20, Bytes: 1 << 30}, "unlimited": {Version: recordVersion},
	})
	frozen.List(t, "paths", []string{New(plugintest.NewHost("/root")).records() + "/KEY" + suffix})
}
