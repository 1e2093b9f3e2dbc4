package chart

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/trivet-csi/trivet/test/frozen"
)

const (
	valuesFile = "../../docs/reference/values.md"
	valuesHead = `# Values of the chart
<!-- Generated from deploy/chart/values.yaml by ` + "`make docs-values`" + `. -->
The chart refuses unknown keys and invalid values with a reason. [Install](../operations/install.md) groups the values by task. The keys of ` + "`pools.default`" + ` apply to every pool; those that are not set have an example in place of the default.

| value | default | meaning |
|---|---|---|
`
)

// TestValuesDocumented checks that docs/reference/values.md matches values.yaml. With -update, the test writes it.
func TestValuesDocumented(t *testing.T) {
	var file yaml.Node
	must(t, yaml.Unmarshal([]byte(read(t, chart+"/values.yaml")), &file))
	var rows strings.Builder
	rows.WriteString(valuesHead)
	writeValues(t, &rows, "", file.Content[0])
	if *frozen.Update {
		must(t, os.WriteFile(valuesFile, []byte(rows.String()), 0o644)) //nolint:gosec // all users may read it
	}
	if read(t, valuesFile) != rows.String() {
		t.Errorf("%s does not match values.yaml: run make docs-values", valuesFile)
	}
}

// sidecars begins the keys of the sidecars, each of which has one row.
const sidecars = "sidecars."

// writeValues writes a row for each key of a map, and rows for the keys below it.
func writeValues(t *testing.T, rows *strings.Builder, prefix string, m *yaml.Node) {
	t.Helper()
	for i := 0; i < len(m.Content); i += 2 {
		key, value := m.Content[i], m.Content[i+1]
		path := prefix + key.Value
		meaning := writeOptional(rows, prefix, lastParagraph(key.HeadComment))
		for _, comment := range []string{key.LineComment, value.LineComment} {
			meaning = strings.TrimSpace(meaning + " " + text(strings.Split(comment, "\n")))
		}
		if list := value.Kind == yaml.SequenceNode && len(value.Content) > 0 && value.Content[0].Kind == yaml.MappingNode && value.Style&yaml.FlowStyle == 0; list {
			writeRow(rows, path, "", meaning)
			writeValues(t, rows, path+"[].", value.Content[0])
			continue
		}
		if value.Kind == yaml.MappingNode && len(value.Content) > 0 && value.Style&yaml.FlowStyle == 0 && prefix != sidecars {
			if meaning != "" {
				writeRow(rows, path, "", meaning)
			}
			writeValues(t, rows, path+".", value)
			continue
		}
		writeRow(rows, path, flow(t, value), meaning)
	}
}

// optional matches a key in a comment, such as "# reserve: 2%  # meaning", and more a line that continues
// its meaning.
var (
	optional = regexp.MustCompile(`^# ([a-zA-Z]+): (\S+) +# (.*)$`)
	more     = regexp.MustCompile(`^# {10,}# (.*)$`)
)

// writeOptional writes a row for each key in a comment, and returns the text of the other lines.
func writeOptional(rows *strings.Builder, prefix string, comment []string) string {
	var rest []string
	for i := 0; i < len(comment); i++ {
		match := optional.FindStringSubmatch(comment[i])
		if match == nil {
			rest = append(rest, comment[i])
			continue
		}
		meaning := []string{"# " + match[3]}
		for i+1 < len(comment) && more.MatchString(comment[i+1]) {
			i++
			meaning = append(meaning, "# "+more.FindStringSubmatch(comment[i])[1])
		}
		writeRow(rows, prefix+match[1], strings.Trim(match[2], `"`), text(meaning))
	}
	return text(rest)
}

// example matches a list in a comment.
var example = regexp.MustCompile(`(?m)^# - .*\n(?:#   .*\n)*`)

// lastParagraph returns the lines of a comment after its last empty line, without examples.
func lastParagraph(comment string) []string {
	paragraphs := strings.Split(comment, "\n\n")
	return strings.Split(example.ReplaceAllString(paragraphs[len(paragraphs)-1], ""), "\n")
}

// text joins the lines of a comment, in the syntax of a Markdown table.
func text(lines []string) string {
	var words []string
	for _, line := range lines {
		words = append(words, strings.Fields(strings.TrimPrefix(line, "#"))...)
	}
	return strings.NewReplacer("|", `\|`, "<", `\<`).Replace(strings.Join(words, " "))
}

// flow returns a value on one line.
func flow(t *testing.T, value *yaml.Node) string {
	t.Helper()
	plain := *value
	plain.HeadComment, plain.LineComment, plain.FootComment = "", "", ""
	plain.Style |= yaml.FlowStyle
	line, err := yaml.Marshal(&plain)
	must(t, err)
	return strings.Join(strings.Fields(string(line)), " ")
}

func writeRow(rows *strings.Builder, path, value, meaning string) {
	if value != "" {
		value = "`" + value + "`"
	}
	fmt.Fprintf(rows, "| `%s` | %s | %s |\n", path, value, meaning)
}
