package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"

	"github.com/trivet-csi/trivet/test/frozen"
)

const referenceDir = "../../docs/reference/cli"

var manDir = flag.String("man", "", "`directory` to write the man pages to; empty: a temporary one")

// clearEnvironment removes the variables that change the defaults of flags.
func clearEnvironment(t *testing.T) {
	t.Helper()
	for _, name := range []string{"CSI_ENDPOINT", driverNameVariable} {
		t.Setenv(name, "")
	}
}

// TestReference: docs/reference/cli contains the current page of each command, and no other pages. With -update,
// the test writes them.
func TestReference(t *testing.T) {
	clearEnvironment(t)
	pages := map[string]string{}
	for _, c := range everyCommand() {
		pages[pageName(c)] = page(c)
	}
	if *frozen.Update {
		writeReference(t, pages)
	}
	files, err := filepath.Glob(referenceDir + "/*")
	check(t, err)
	for _, path := range files {
		if _, ok := pages[filepath.Base(path)]; !ok {
			t.Errorf("%s is the page of no command: run make docs-cli", path)
		}
	}
	for name, want := range pages {
		if have, err := os.ReadFile(filepath.Join(referenceDir, name)); err != nil || string(have) != want {
			t.Errorf("%s/%s does not match the command (%v): run make docs-cli", referenceDir, name, err)
		}
	}
}

func writeReference(t *testing.T, pages map[string]string) {
	t.Helper()
	check(t, os.RemoveAll(referenceDir))
	check(t, os.MkdirAll(referenceDir, 0o755))
	for name, text := range pages {
		check(t, os.WriteFile(filepath.Join(referenceDir, name), []byte(text), 0o644)) //nolint:gosec // all users may read it
	}
}

// pageName returns the name of the page of a command, such as trivet-pool-init.md.
func pageName(c *cobra.Command) string {
	return strings.ReplaceAll(c.CommandPath(), " ", "-") + ".md"
}

// page returns the reference page of a command.
func page(c *cobra.Command) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n<!-- Generated from the command in cmd/trivet by `make docs-cli`. -->\n%s.\n\n", c.CommandPath(), c.Short)
	synopsis := c.UseLine()
	if c.HasSubCommands() {
		synopsis += "\n" + c.CommandPath() + " COMMAND"
	}
	fmt.Fprintf(&b, "```text\n%s\n```\n%s\n", synopsis, c.Long)
	if c.Example != "" {
		fmt.Fprintf(&b, "\n## Examples\n```text\n%s\n```\n", unindent(c.Example))
	}
	if rows := flagRows(c); rows != "" && !c.DisableFlagParsing {
		fmt.Fprintf(&b, "\n## Flags\n| flag | default | meaning |\n|---|---|---|\n%s", rows)
	}
	if rows := commandRows(c); rows != "" {
		fmt.Fprintf(&b, "\n## Commands\n| command | |\n|---|---|\n%s", rows)
	}
	if c.HasParent() {
		fmt.Fprintf(&b, "\nPart of [%s](%s).\n", c.Parent().CommandPath(), pageName(c.Parent()))
	}
	return b.String()
}

func unindent(text string) string {
	return strings.TrimPrefix(strings.ReplaceAll(text, "\n  ", "\n"), "  ")
}

// flagRows returns the rows of the table of the flags of a command.
func flagRows(c *cobra.Command) string {
	var b strings.Builder
	c.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
		value, usage := pflag.UnquoteUsage(f)
		name := strings.TrimSpace("--" + f.Name + " " + value)
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		standard := strings.Trim(f.DefValue, "[]")
		if standard != "" && value != "" {
			standard = "`" + standard + "`"
		} else {
			standard = ""
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", name, standard, inTable(usage))
	})
	return b.String()
}

// inTable escapes a text for a cell of a Markdown table.
func inTable(text string) string {
	return strings.NewReplacer("|", `\|`, "<", `\<`, "_", `\_`, "*", `\*`).Replace(text)
}

// commandRows returns the rows of the table of the subcommands of a command.
func commandRows(c *cobra.Command) string {
	var b strings.Builder
	for _, sub := range c.Commands() {
		fmt.Fprintf(&b, "| [%s](%s) | %s |\n", sub.CommandPath(), pageName(sub), sub.Short)
	}
	return b.String()
}

// TestManPages: each command has a man page with a name, a synopsis and its flags. With -man, the pages remain in
// that directory.
func TestManPages(t *testing.T) {
	clearEnvironment(t)
	dir := *manDir
	if dir == "" {
		dir = t.TempDir()
	}
	check(t, os.MkdirAll(dir, 0o755))
	for _, r := range []root{newRootCommand(), newPluginCommand()} {
		r.DisableAutoGenTag = true
		check(t, doc.GenManTree(r.Command, &doc.GenManHeader{Section: "8", Manual: "Trivet", Source: "Trivet " + version}, dir))
	}
	for _, c := range everyCommand() {
		if !c.IsAvailableCommand() { // the command help
			continue
		}
		path := filepath.Join(dir, strings.TrimSuffix(pageName(c), ".md")+".8")
		b, err := os.ReadFile(path)
		check(t, err)
		for _, want := range []string{".SH NAME", ".SH SYNOPSIS", c.Short[:10]} {
			if !strings.Contains(string(b), want) {
				t.Errorf("%s does not contain %q", path, want)
			}
		}
	}
}
