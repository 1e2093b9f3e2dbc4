package shared

import (
	"testing"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenRecords: drivers of different versions understand each other's files on an export.
func TestFrozenRecords(t *testing.T) {
	frozen.JSON[client]("clients").Test(t, map[string]client{"client": {Version: clientVersion, Client: "identity", Node: "node-1.example"}})
	frozen.JSON[page]("ledger").Test(t, map[string]page{
		"grown": {Version: ledgerVersion, Writer: "ABCDEFGHIJKLMNOPQRSTUVWXYZ/1", Growths: 2, Grown: []string{"pvc-1", "pvc-2"}},
		"first": {Version: ledgerVersion, Writer: "ABCDEFGHIJKLMNOPQRSTUVWXYZ/1"},
	})
}

// TestFrozenFiles: the files with which drivers of different versions coordinate keep their paths below the pool.
func TestFrozenFiles(t *testing.T) {
	frozen.List(t, "files", []string{OwnersDir, tmpDir, ledgerFile, reaperFile, clientPath("identity"), growSuffix})
}
