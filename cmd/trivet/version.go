package main

import (
	"cmp"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// buildInfo describes the build of this program. Commit and Date are empty if the program was built without
// information of git.
type buildInfo struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	// Date is that of the commit (RFC 3339).
	Date string `json:"date,omitempty"`
	// Modified is true if the sources differed from the commit.
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
	// CSI is the version of the CSI specification.
	CSI string `json:"csi,omitempty"`
}

// csiModule contains the CSI specification.
const csiModule = "github.com/container-storage-interface/spec"

// newVersionCommand returns the command version of a program.
func newVersionCommand(program string) *cobra.Command {
	var out *output
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Long: `Prints the version of this program, the commit and its date, and the release of Go
and the platform for which it was built.`,
		Example: "  " + program + " version\n  " + program + " version -o json",
		RunE: func(*cobra.Command, []string) error {
			b := readBuildInfo()
			return out.write(b, newTable([]buildInfo{b},
				column[buildInfo]{name: "VERSION", cell: func(b buildInfo) string { return b.Version }},
				column[buildInfo]{name: "COMMIT", cell: func(b buildInfo) string { return cmp.Or(b.shortCommit(), "-") }},
				column[buildInfo]{name: "DATE", cell: func(b buildInfo) string { return cmp.Or(b.Date, "-") }},
				column[buildInfo]{name: "GO", cell: func(b buildInfo) string { return b.Go }},
				column[buildInfo]{name: "PLATFORM", cell: func(b buildInfo) string { return b.Platform }},
				column[buildInfo]{name: "CSI", wide: true, cell: func(b buildInfo) string { return b.CSI }},
			))
		},
	}
	out = outputFlag(cmd)
	return cmd
}

func readBuildInfo() buildInfo {
	b := buildInfo{Version: version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.time":
			b.Date = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	for _, d := range info.Deps {
		if d.Path == csiModule {
			b.CSI = d.Version
		}
	}
	return b
}

// shortCommit returns the first characters of the commit, and "+changes" if the sources differed from it.
func (b buildInfo) shortCommit() string {
	commit := b.Commit[:min(len(b.Commit), 12)]
	if b.Modified {
		commit += "+changes"
	}
	return commit
}
