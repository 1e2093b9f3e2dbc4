package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"
)

// The defaults of flags that several commands have: beside the shipped systemd unit no
// command needs any, and in the driver's pod the environment has what differs.
const (
	defaultConfig   = "/etc/trivet/config.yaml"
	defaultStateDir = "/var/lib/trivet"
	defaultEndpoint = "unix:///run/trivet/csi.sock"
)

// driverNameVariable of the environment comes before the default of --driver-name.
const driverNameVariable = "CSI_DRIVER_NAME"

// patience is how long a pool, or another thing that is looked at, may take.
const patience = 20 * time.Second

func configFlag(flags *flag.FlagSet) *string {
	return flags.String("config", defaultConfig, "configuration `file`; if the default one is not there, one pool below the state directory is meant")
}

func stateDirFlag(flags *flag.FlagSet) *string {
	return flags.String("state-dir", defaultStateDir, "`directory` of this node's state")
}

func endpointFlag(flags *flag.FlagSet) *string {
	return flags.String("endpoint", cmp.Or(os.Getenv("CSI_ENDPOINT"), defaultEndpoint), "`unix:///path` of the CSI socket; $CSI_ENDPOINT comes before the default")
}

func outputFlag(flags *flag.FlagSet, formats ...string) *string {
	format, all := formats[0], strings.Join(formats, ", ")
	flags.Func("o", fmt.Sprintf("output `format`: %s (default %q)", all, format), func(asked string) error {
		if !slices.Contains(formats, asked) {
			return errors.New("want one of " + all)
		}
		format = asked
		return nil
	})
	return &format
}

// errHelp means: help was asked for and given.
var errHelp = errors.New("help was given")

// asksForHelp tells whether the first argument of a command with subcommands is help.
func asksForHelp(args []string) bool {
	return len(args) > 0 && slices.Contains([]string{"help", "--help", "-help", "-h"}, args[0])
}

// parse reads flags, and refuses what is left over.
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

// write writes a value as -o asks; rows are its lines as a table, the head first.
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

func writeTable(w io.Writer, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		if _, err := fmt.Fprintln(t, strings.Join(printable(row), "\t")); err != nil {
			return err
		}
	}
	return t.Flush()
}

// printable keeps what others named from moving the cursor or breaking the table.
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
