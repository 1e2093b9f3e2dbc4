package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/trivet-csi/trivet/driver"
)

// The defaults of flags that several commands have. They fit the shipped systemd unit; in the
// driver's pod the environment overrides them.
const (
	defaultConfig   = "/etc/trivet/config.yaml"
	defaultStateDir = "/var/lib/trivet"
	defaultEndpoint = "unix:///run/trivet/csi.sock"
)

// driverNameVariable of the environment overrides the default of --driver-name.
const driverNameVariable = "CSI_DRIVER_NAME"

// patience limits each read of a pool, of the devices of this node, or of an NFS server.
const patience = 20 * time.Second

func configFlag(flags *flag.FlagSet) *string {
	return flags.String("config", defaultConfig, "configuration `file`; if the default file is absent, one pool in STATE_DIR/pools/default is used")
}

func stateDirFlag(flags *flag.FlagSet) *string {
	return flags.String("state-dir", defaultStateDir, "`directory` of this node's state")
}

func endpointFlag(flags *flag.FlagSet) *string {
	return flags.String("endpoint", cmp.Or(os.Getenv("CSI_ENDPOINT"), defaultEndpoint), "`unix:///path` of the CSI socket; $CSI_ENDPOINT overrides the default")
}

func outputFlag(flags *flag.FlagSet, formats ...string) *string {
	format, all := formats[0], strings.Join(formats, ", ")
	flags.Func("o", fmt.Sprintf("output `format`: %s (default %q)", all, format), func(name string) error {
		if !slices.Contains(formats, name) {
			return errors.New("must be one of " + all)
		}
		format = name
		return nil
	})
	return &format
}

// errHelp means that help was requested and printed.
var errHelp = errors.New("help was printed")

// isHelp reports whether the first argument of a command with subcommands requests help.
func isHelp(args []string) bool {
	return len(args) > 0 && slices.Contains([]string{"help", "--help", "-help", "-h"}, args[0])
}

// untilSignal returns a context that ends at the first signal. A second signal ends the process.
func untilSignal() (context.Context, func()) {
	ctx, restore := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, restore)
	return ctx, restore
}

// loadConfig loads the configuration file of --config. Only the default file may be missing.
func loadConfig(path, stateDir string) (driver.Config, error) {
	return driver.LoadConfig(path, path == defaultConfig, stateDir, kinds)
}

// parse parses flags, and refuses all other arguments.
func parse(flags *flag.FlagSet, args []string) error {
	if err := flags.Parse(args); err != nil {
		return flagError(err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q: flags begin with --", flags.Arg(0))
	}
	return nil
}

func flagError(err error) error {
	if errors.Is(err, flag.ErrHelp) {
		return errHelp
	}
	return err
}

// write writes a value in the format of -o. rows is the value as a table, with the header.
func write(w io.Writer, format string, value any, rows [][]string) error {
	switch format {
	case "table":
		return writeTable(w, rows)
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(value)
	}
	e := yaml.NewEncoder(w)
	e.SetIndent(2)
	return errors.Join(e.Encode(value), e.Close())
}

// rows returns a table with a header and a row for each object.
func rows[T any](header string, all []T, row func(T) []string) [][]string {
	table := [][]string{strings.Fields(header)}
	for _, one := range all {
		table = append(table, row(one))
	}
	return table
}

func writeTable(w io.Writer, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		if _, err := fmt.Fprintln(t, strings.Join(printable(row), "\t")); err != nil {
			return err
		}
	}
	return t.Flush()
}

// printable replaces unprintable characters, which in the names of volumes could move the cursor or break the
// table.
func printable(row []string) []string {
	clean := make([]string, len(row))
	for i, cell := range row {
		clean[i] = strings.Map(func(r rune) rune {
			if unicode.IsPrint(r) {
				return r
			}
			return ' '
		}, cell)
	}
	return clean
}
